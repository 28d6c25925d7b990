// Reports masked loads and stores to the sanitizer of a build, which instruments no builtin function: each name below
// becomes a report, then itself. Included before every source of the kernels by tests/sanitize.py.
#pragma once
#include <immintrin.h>

#include <cstdint>

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __asan_loadN(const void *, uintptr_t), __asan_storeN(const void *, uintptr_t);
#define REPORT_LOAD __asan_loadN
#define REPORT_STORE __asan_storeN
#elif defined(__SANITIZE_THREAD__)
extern "C" void __tsan_read_range(const void *, uintptr_t), __tsan_write_range(const void *, uintptr_t);
#define REPORT_LOAD __tsan_read_range
#define REPORT_STORE __tsan_write_range
#endif

template <int BYTES>
inline void report(void (*access)(const void *, uintptr_t), const void *x, uint32_t mask) {
  for (int i = 0; mask; i++, mask >>= 1)
    if (mask & 1) access(static_cast<const char *>(x) + i * BYTES, BYTES);
}

#define _mm512_maskz_loadu_ps(m, x) (report<4>(REPORT_LOAD, x, m), _mm512_maskz_loadu_ps(m, x))
#define _mm512_mask_storeu_ps(x, m, y) (report<4>(REPORT_STORE, x, m), _mm512_mask_storeu_ps(x, m, y))
#define _mm512_mask_store_ps(x, m, y) (report<4>(REPORT_STORE, x, m), _mm512_mask_store_ps(x, m, y))
#define _mm512_maskz_loadu_epi16(m, x) (report<2>(REPORT_LOAD, x, m), _mm512_maskz_loadu_epi16(m, x))
#define _mm256_maskz_loadu_epi16(m, x) (report<2>(REPORT_LOAD, x, m), _mm256_maskz_loadu_epi16(m, x))
#define _mm256_mask_storeu_epi16(x, m, y) (report<2>(REPORT_STORE, x, m), _mm256_mask_storeu_epi16(x, m, y))
#define _mm256_maskload_ps(x, m) \
  (report<4>(REPORT_LOAD, x, _mm256_movemask_ps(_mm256_castsi256_ps(m))), _mm256_maskload_ps(x, m))
#define _mm256_maskstore_ps(x, m, y) \
  (report<4>(REPORT_STORE, x, _mm256_movemask_ps(_mm256_castsi256_ps(m))), _mm256_maskstore_ps(x, m, y))
