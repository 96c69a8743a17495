// What leaves a tile: its sums, by rows of tokens, or gated and quantised.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "w4a8_grouped_gemm_ptx.cuh"
#include "w4a8_grouped_gemm_tiles.cuh"

namespace w4a8 {

constexpr float kLargest = 448.0f;   // of e4m3
constexpr float kSmallest = 1e-12f;  // a group of zeros still needs a scale

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

__device__ __forceinline__ float unpack(uint32_t pair, int which) {
  return __uint_as_float(which ? pair & 0xFFFF0000u : pair << 16);
}

__device__ __forceinline__ uint32_t pack_e4m3(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

// By the two computing warpgroups, in the form F of tiles.
template <typename F>
struct Store {
  static constexpr int kBlocks = F::kNumBlocks;
  using S = typename F::S;
  using Place = typename F::Place;
  template <int kWidth>
  using Sums = typename F::template Sums<kWidth>;

  // Scales of a tile's tokens, one a row, to this warpgroup's place: in front of the tile, so that
  // nobody waits for them behind it.
  template <int kWidth>
  static __device__ __forceinline__ void copy_row_scales(
      S& s, const Problem& p, const Tile& t, const Place& at) {
    const float* from = first_scale(p, t);
    const uint32_t to = ptx::shared_address(s.row_scales[at.warpgroup]);
#pragma unroll
    for (int token = at.thread; token < kWidth; token += 128) {
      ptx::copy_word(to + token * 4, from + token * p.scale_stride_row, token < t.num_tokens);
    }
  }

  // What this thread has of eight tokens and a block, in bfloat16: pairs of tokens, of weight rows r
  // and r + 8.
  template <int kWidth>
  static __device__ __forceinline__ uint2 scaled(
      const Sums<kWidth>& sum, int block, int eight, float2 tokens) {
    uint32_t pairs[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 two =
          __half22float2(reinterpret_cast<const __half2&>(sum.pair[block][2 * eight + i]));
      const float row = sum.row[block][i];
      pairs[i] = pack(two.x * (row * tokens.x), two.y * (row * tokens.y));
    }
    return {pairs[0], pairs[1]};
  }

  // This thread's two of eight tokens: their scales, or the units of these.
  template <int kWidth>
  static __device__ __forceinline__ float2 of_tokens(
      const Sums<kWidth>& sum, int eight, const Place& at) {
    if constexpr (F::kHasRowScales) return ptx::load_float2(at.tokens + eight * 32);
    else return make_float2(unpack(sum.token[eight], 0), unpack(sum.token[eight], 1));
  }

  // Some tokens of one block to their staged rows, turned over: tokens become rows.
  template <int kWidth, int kColumns>
  static __device__ __forceinline__ void stage(
      uint8_t* staging, const Sums<kWidth>& sum, int block, int first, uint32_t thread,
      const Place& at) {
    const int row = thread % 8 + thread / 16 % 2 * 8;
    const int column = block * 64 + thread / 32 * 16 + thread / 8 % 2 * 8;
    const uint32_t to = ptx::shared_address(staging + row * S::kPitch + column * 2);
#pragma unroll
    for (int j = 0; j < kColumns / 8; j += 2) {
      const int eight = first / 8 + j;
      const uint2 a = scaled<kWidth>(sum, block, eight, of_tokens<kWidth>(sum, eight, at));
      if constexpr (kColumns == 8) {
        ptx::store_transposed_x2(to, a.x, a.y);
      } else {
        const uint2 b =
            scaled<kWidth>(sum, block, eight + 1, of_tokens<kWidth>(sum, eight + 1, at));
        ptx::store_transposed_x4(to + j * 8 * S::kPitch, a.x, a.y, b.x, b.y);
      }
    }
  }

  // Rows that two barriers stage at a time.
  template <int kWidth>
  static constexpr int kRound = kWidth / ((kWidth + S::kStaged - 1) / S::kStaged);

  static __device__ __forceinline__ __nv_bfloat16* output(
      const Problem& p, const Tile& t, int token, const Place& at) {
    return static_cast<__nv_bfloat16*>(p.out) + static_cast<long long>(t.first_row + token) * p.n +
           t.across * F::kRows + at.warpgroup * S::kColumns;
  }

  // This thread's number, in a register that begins here: what hangs on it would otherwise take
  // registers through all tiles.
  static __device__ __forceinline__ uint32_t thread_of_block() {
    uint32_t thread = threadIdx.x;
    ptx::keep(thread);
    return thread;
  }

  // One round of tokens, from `first` on. Its barriers are those of the kThreads threads that read
  // what is staged.
  template <int kWidth, int kThreads>
  static __device__ __forceinline__ void stage_round(
      uint8_t* staging, const Sums<kWidth>& sum, int first, uint32_t thread, int barrier,
      const Place& at) {
    if (F::kHasRowScales && first == 0) ptx::copy_word_wait();
    ptx::barrier_sync<kThreads>(barrier);  // the rows staged before are read
#pragma unroll
    for (int h = 0; h < kBlocks; ++h) {
      stage<kWidth, kRound<kWidth>>(staging, sum, h, first, thread, at);
    }
    ptx::barrier_sync<kThreads>(barrier);
  }

  // What a tile of 64 tokens writes may leave the cache first: 1 to 2 % less time where memory binds
  // and the tokens of all experts are half the cache; of fewer or more tokens none.
  template <int kWidth>
  static __device__ __forceinline__ void write(__nv_bfloat16* to, uint4 values) {
    if constexpr (kWidth == 64) __stcs(reinterpret_cast<uint4*>(to), values);
    else *reinterpret_cast<uint4*>(to) = values;
  }

  template <int kWidth>
  static __device__ __forceinline__ void store(
      S& s, const Problem& p, const Tile& t, const Sums<kWidth>& sum, const Place& at) {
    constexpr int kPieces16 = S::kColumns / 8;  // 16-byte pieces in a row
    const uint32_t thread = thread_of_block() % 128;
    uint8_t* staging = s.staging[at.warpgroup];
#pragma unroll
    for (int first = 0; first < kWidth; first += kRound<kWidth>) {
      stage_round<kWidth, 128>(staging, sum, first, thread, 1 + at.warpgroup, at);
      const int column = thread % kPieces16 * 8;
      __nv_bfloat16* out = output(p, t, first, at) + column;
      const int rows = min(t.num_tokens - first, kRound<kWidth>);
      for (int row = thread / kPieces16; row < rows; row += 128 / kPieces16) {
        write<kWidth>(out + static_cast<long long>(row) * p.n,
                      *reinterpret_cast<const uint4*>(staging + row * S::kPitch + column * 2));
      }
    }
  }

  // What is gated is rounded to bfloat16 before, as it would be between two kernels. kGiven: there
  // is a scale to quantise it with.
  template <int kWidth, bool kGiven>
  static __device__ __forceinline__ void store_gated(
      S& s, const Problem& p, const Tile& t, const Sums<kWidth>& sum, const Place& at) {
    constexpr int kLanes = kGroup / 8;  // of a token's group: 16 bytes of either half each
    const uint32_t thread = thread_of_block();
    const int column = thread % kLanes * 8;
    const int half = p.n / 2;
    uint8_t* const out = static_cast<uint8_t*>(p.out) +
                         static_cast<long long>(t.first_row) * half + t.across * kGroup + column;
    float* const scales = p.out_scales + t.expert * p.out_scale_stride_expert +
                          t.across * p.out_scale_stride_group + t.first_token;
    float factor;
    if constexpr (kGiven) factor = __frcp_rn(*p.out_scales);
#pragma unroll
    for (int first = 0; first < kWidth; first += kRound<kWidth>) {
      stage_round<kWidth, 256>(s.staging[at.warpgroup], sum, first, thread % 128, 5, at);
      // Tokens that are none are computed, too: without branches they overlap.
#pragma unroll
      for (int i = 0; i < kRound<kWidth>; i += 16) {
        const int staged = i + thread / kLanes, row = first + staged;
        float values[8];
        gated(s.staging[0] + staged * S::kPitch + column * 2,
              s.staging[1] + staged * S::kPitch + column * 2, values);
        float peak;
        if constexpr (!kGiven) {
          peak = largest_of_group(values);
          factor = __fdiv_rn(kLargest, peak);
        }
        uint32_t words[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          words[j] = pack_e4m3(values[4 * j] * factor, values[4 * j + 1] * factor) |
                     pack_e4m3(values[4 * j + 2] * factor, values[4 * j + 3] * factor) << 16;
        }
        if (row >= t.num_tokens) continue;
        *reinterpret_cast<uint2*>(out + static_cast<long long>(row) * half) =
            make_uint2(words[0], words[1]);
        if constexpr (!kGiven) {
          if (column == 0) scales[row] = __fdiv_rn(peak, kLargest);
        }
      }
    }
  }

  // silu(gate) * up of eight columns.
  static __device__ __forceinline__ void gated(
      const uint8_t* gate, const uint8_t* up, float (&values)[8]) {
    const uint4 gates = *reinterpret_cast<const uint4*>(gate);
    const uint4 ups = *reinterpret_cast<const uint4*>(up);
    const uint32_t gate_words[] = {gates.x, gates.y, gates.z, gates.w};
    const uint32_t up_words[] = {ups.x, ups.y, ups.z, ups.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float a = unpack(gate_words[i / 2], i % 2), b = unpack(up_words[i / 2], i % 2);
      values[i] = __fdividef(a, 1.0f + __expf(-a)) * b;
    }
  }

  // Of the 128 that 16 lanes have, by magnitude.
  static __device__ __forceinline__ float largest_of_group(const float (&values)[8]) {
    float peak = kSmallest;
#pragma unroll
    for (float value : values) peak = fmaxf(peak, fabsf(value));
#pragma unroll
    for (int distance = 8; distance; distance /= 2) {
      peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, distance));
    }
    return peak;
  }
};

}  // namespace w4a8
