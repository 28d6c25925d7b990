// The library's C interface. Instruction sets are numbered from the lowest on; backends/cpu.py has their names.
#include <cpuid.h>

#include "kernels.h"
#include "threads.h"

extern "C" {

// The highest instruction set that this machine has; 0 for none that serves. The compiler's function asks the operating
// system too, which has to save the registers.
int64_t dilated_attention_instruction_set() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return 0;
  return __builtin_cpu_supports("avx512bf16") ? 2 : 1;
}

// Whether this machine multiplies tiles of bfloat16. No kernel here does; PyTorch's operators do.
int64_t dilated_attention_has_amx() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & bit_AMX_BF16);
}

// The size of the structure, so that two versions of it do not meet.
int64_t dilated_attention_call_size() { return sizeof(Call); }

int64_t dilated_attention_has_pool() { return has_pool(); }

int64_t dilated_attention_run(int64_t kernel, int64_t type, int64_t set, const Call *call) {
  return set >= 2 && type == 1 ? run_avx512_bf16(Kernel(kernel), type, *call) : run_avx512(Kernel(kernel), type, *call);
}
}
