// Packed int4 weights to the operands of matrix instructions.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "../build/hopper_ptx.cuh"

namespace w4a8 {

// Eight codes to two registers of e4m3.
template <bool kSigned>
__device__ __forceinline__ void decode(uint32_t codes, uint32_t& low, uint32_t& high) {
  if constexpr (kSigned) {
    low = codes & 0x87878787u;
    high = __funnelshift_l(codes, codes, 4) & 0x87878787u;
  } else {
    const uint32_t shifted = codes >> 4;
    low = (codes & 0x01010101u) * 0x82u + (codes & 0x0E0E0E0Eu);
    high = (shifted & 0x01010101u) * 0x82u + (shifted & 0x0E0E0E0Eu);
  }
}

// This thread's codes of 64 rows x 128 columns.
struct Codes {
  uint4 first, second;
};

__device__ __forceinline__ Codes load_codes(uint32_t from) {
  return {ptx::load_uint4(from), ptx::load_uint4(from + 2048)};
}

// The same as the A operands of four wgmma.
template <bool kSigned>
__device__ __forceinline__ void decode(const Codes& codes, uint32_t (&a)[16]) {
  decode<kSigned>(codes.first.x, a[0], a[1]);
  decode<kSigned>(codes.first.y, a[2], a[3]);
  decode<kSigned>(codes.first.z, a[4], a[5]);
  decode<kSigned>(codes.first.w, a[6], a[7]);
  decode<kSigned>(codes.second.x, a[8], a[9]);
  decode<kSigned>(codes.second.y, a[10], a[11]);
  decode<kSigned>(codes.second.z, a[12], a[13]);
  decode<kSigned>(codes.second.w, a[14], a[15]);
#pragma unroll
  for (uint32_t& operand : a) ptx::keep(operand);  // before the fence that wgmma needs
}

}  // namespace w4a8
