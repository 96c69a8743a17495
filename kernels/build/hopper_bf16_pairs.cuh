// Pairs of bfloat16 in a word, as threads of a warp have them of what the matrix unit gives.
#pragma once

#include <cuda_bf16.h>
#include <stdint.h>

namespace pairs {

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(both);
}

// The four words of four lanes, turned over: lane i gets word i of each.
__device__ __forceinline__ void turn_over(uint32_t* words, int lane) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t& low = words[distance == 1 ? 2 * i : i];
      uint32_t& high = words[distance == 1 ? 2 * i + 1 : i + 2];
      const bool upper = lane & distance;
      const uint32_t got = __shfl_xor_sync(~0u, upper ? low : high, distance);
      (upper ? low : high) = got;
    }
  }
}

}  // namespace pairs
