// The library's C interface. Instruction sets are numbered from the lowest on, for each architecture; backends/cpu.py has
// their names.
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#else
#include <sys/auxv.h>
#endif

#include <cstddef>
#include <string>

#include "estimate.h"
#include "kernels.h"
#include "threads.h"

namespace {

#ifdef __x86_64__

// Where cpuid's answers have a bit each (Intel's manual, volume 2A): compilers name them differently.
constexpr unsigned F16C = 1u << 29, AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;

bool has_f16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & F16C);
}

bool has_amx() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & AMX_TILE) && (edx & AMX_BF16);
}

// Linux lends the tile registers to a process and its children only on request. It refuses where it is too old, or where
// a thread's stack for signals is too small to save them.
bool lends_tiles() {
  constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

// The compiler's function asks the operating system too, which has to save the registers.
int64_t highest_set() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !has_f16c()) return 0;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return 1;
  if (!__builtin_cpu_supports("avx512bf16")) return 2;
  return has_amx() && lends_tiles() ? 4 : 3;
}

int run(int64_t set, Kernel kernel, int64_t type, const Call &call) {
  const auto run = set == 1 ? run_avx2 : set == 2 || call.few ? run_avx512 : set == 3 ? run_avx512_bf16 : run_amx;
  return run(kernel, type, call);
}

int estimate(int64_t set, Estimator estimator, int64_t type, const Estimate &call) {
  return (set == 1 ? estimate_avx2 : estimate_avx512)(estimator, type, call);
}

#else

bool has_amx() { return false; }

bool has_bfloat16() {
#ifdef __APPLE__
  int found = 0;
  size_t size = sizeof found;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &found, &size, nullptr, 0) == 0 && found;
#else
  constexpr unsigned long BF16 = 1ul << 14;  // HWCAP2_BF16 of Linux, which older headers lack
  return getauxval(AT_HWCAP2) & BF16;
#endif
}

int64_t highest_set() { return has_bfloat16() ? 2 : 1; }

int run(int64_t set, Kernel kernel, int64_t type, const Call &call) {
  return (set == 1 || call.few ? run_neon : run_neon_bf16)(kernel, type, call);
}

int estimate(int64_t, Estimator estimator, int64_t type, const Estimate &call) {
  return estimate_neon(estimator, type, call);
}

#endif

struct Field {
  const char *name;
  size_t offset;
};

}  // namespace

extern "C" {

// The highest instruction set that this machine has; 0 for none that serves.
int64_t dilated_attention_instruction_set() { return highest_set(); }

// Whether this machine multiplies tiles of bfloat16, as PyTorch's operators do.
int64_t dilated_attention_has_amx() { return has_amx(); }

// What the library was made of (build.py), so that it does not meet callers of another version.
const char *dilated_attention_sources() { return SOURCES_DIGEST; }

// The fields of Call, "name offset" each, and its size: backends/cpu.py compares them with its own structure.
const char *dilated_attention_call_fields() {
#define AT(field) Field{#field, offsetof(Call, field)}
  static constexpr Field FIELDS[] = {
      AT(q), AT(k), AT(v), AT(dout), AT(out), AT(lse), AT(dlse), AT(stats), AT(dq), AT(dk), AT(dv), AT(lines), AT(jobs),
      AT(indptr), AT(indices), AT(kinds), AT(bits), AT(hidden), AT(lengths), AT(query_words), AT(key_words), AT(bias),
      AT(bias_sums), AT(query_at), AT(key_at), AT(B), AT(N), AT(M), AT(H), AT(G), AT(D), AT(qsb), AT(qsn), AT(qsh),
      AT(ksb), AT(ksn), AT(ksh), AT(vsb), AT(vsn), AT(vsh), AT(dsb), AT(dsn), AT(dsh), AT(job_count), AT(spans),
      AT(own), AT(lsb), AT(lsh), AT(LH), AT(size), AT(row_bytes), AT(kwn), AT(kwh), AT(threshold), AT(add_dq),
      AT(add_dkdv), AT(few), AT(joined), AT(by_block), AT(threads), AT(bias_kind), AT(bias_batch), AT(bias_head),
      AT(bias_row), AT(bias_at), AT(column_of_key), AT(column_of_query), AT(first_column), AT(columns), AT(axes),
      AT(query_at_batch), AT(key_at_batch), AT(bias_shared), AT(keep_scale), AT(scores)};
#undef AT
  static const std::string fields = [] {
    std::string all;
    for (const auto &[name, offset] : FIELDS) all += std::string(name) + " " + std::to_string(offset) + " ";
    return all + "size " + std::to_string(sizeof(Call));
  }();
  return fields.c_str();
}

int64_t dilated_attention_has_pool() { return has_pool(); }

// Called with Python's lock.
int64_t dilated_attention_run(int64_t kernel, int64_t type, int64_t set, const Call *call) {
  Watch watch;
  const int status = run(set, Kernel(kernel), type, *call);
  watch.end();
  return status;
}

int64_t dilated_attention_estimate(int64_t estimator, int64_t type, int64_t set, const Estimate *call) {
  return estimate(set, Estimator(estimator), type, *call);
}
}
