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

  // Scales of a tile's tokens, one a row, to this warpgroup's place: before the tile, so that
  // no warp waits for them after it.
  template <int kWidth>
  static __device__ __forceinline__ void copy_row_scales(
      S& s, const Problem& p, const Tile& t, const Place& at) {
    const float* from = first_scale(p, t);
    const uint32_t to = ptx::shared_address(s.row_scales[at.warpgroup]);
    ptx::barrier_sync<128>(2 + at.warpgroup);  // those of the tile before are read
#pragma unroll
    for (int token = at.thread; token < kWidth; token += 128) {
      ptx::copy_word(to + token * 4, from + token * p.scale_stride_row, token < t.num_tokens);
    }
  }

  static __device__ __forceinline__ void wait_for_row_scales(const Place& at) {
    if constexpr (F::kHasRowScales) {
      ptx::copy_word_wait();
      ptx::barrier_sync<128>(2 + at.warpgroup);
    }
  }

  // Of this thread's two of eight tokens the weight rows that it has of them, which are neighbours,
  // in bfloat16.
  template <int kWidth>
  static __device__ __forceinline__ void scaled(
      const Sums<kWidth>& sum, int eight, const Place& at, uint32_t (&words)[2][kBlocks]) {
    constexpr bool kByRow = F::kHasRowScales;
    float2 scales;
    uint32_t units[2];
    if constexpr (kByRow) {
      scales = ptx::load_float2(at.tokens + eight * 32);
    } else {
      units[0] = ptx::both_low_halves(sum.token[eight]);
      units[1] = ptx::both_low_halves(sum.token[eight] >> 16);
    }
#pragma unroll
    for (int h = 0; h < kBlocks; ++h) {
      float2 two[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        two[i] = __half22float2(reinterpret_cast<const __half2&>(sum.pair[h][2 * eight + i]));
        if constexpr (kByRow) two[i].x *= scales.x, two[i].y *= scales.y;
      }
      words[0][h] = pack(two[0].x, two[1].x);
      words[1][h] = pack(two[0].y, two[1].y);
      // Units are powers of two: by them nothing more is rounded.
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t unit = kByRow ? sum.row[h] : ptx::multiply_bfloat16(sum.row[h], units[i]);
        words[i][h] = ptx::multiply_bfloat16(words[i][h], unit);
      }
    }
  }

  // This thread's number, in a register that begins here: what hangs on it would otherwise take
  // registers through all tiles.
  static __device__ __forceinline__ uint32_t thread_of_block() {
    uint32_t thread = threadIdx.x;
    ptx::keep(thread);
    return thread;
  }

  // What tiles of many tokens write may leave the cache first: without, those of 64 tokens take 1 to
  // 2 % longer, where memory binds and the tokens of all experts are half the cache, and those of 128
  // up to 6 %. Of fewer tokens it makes no difference.
  template <int kWidth, typename T>
  static __device__ __forceinline__ void write(T* to, T value) {
    if constexpr (kWidth >= 64) __stcs(to, value);
    else *to = value;
  }

  // From registers, 64 bytes of a token by eight threads: nobody waits for another.
  template <int kWidth>
  static __device__ __forceinline__ void store(
      const Problem& p, const Tile& t, const Sums<kWidth>& sum, const Place& at) {
    const uint32_t thread = thread_of_block();
    wait_for_row_scales(at);
    const int first = thread % 4 * 2;  // token
    const int row = kBlocks == 2 ? thread / 4 * 4 : thread % 128 / 4 * 4 + thread / 128 * 2;
    const long long pitch = 2ll * p.n;
    uint8_t* out = static_cast<uint8_t*>(p.out) + (t.first_row + first) * pitch +
                   2 * (t.across * F::kRows + row);
    const int left = t.num_tokens - first;
#pragma unroll
    for (int j = 0; j < kWidth / 8; ++j) {
      // Without a branch the compiler puts all writes after what all of them need. Where registers
      // are short they then wait for each other; elsewhere that is faster.
      if (kWidth > 64 && !F::kHasRowScales && 8 * j >= t.num_tokens) break;
      uint32_t words[2][kBlocks];
      scaled<kWidth>(sum, j, at, words);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint8_t* const to = out;
        out += i ? 7 * pitch : pitch;
        ptx::keep(out);  // else it is computed anew each time, from parameters that are waited for
        if (8 * j + i >= left) continue;
        if constexpr (kBlocks == 2) {
          write<kWidth>(reinterpret_cast<uint2*>(to), make_uint2(words[i][0], words[i][1]));
        } else {
          write<kWidth>(reinterpret_cast<uint32_t*>(to), words[i][0]);
        }
      }
    }
  }

  // Rows that two barriers stage at a time.
  template <int kWidth>
  static constexpr int kRound = kWidth / ((kWidth + S::kStaged - 1) / S::kStaged);

  // One round of tokens, from `first` on, of both warpgroups.
  template <int kWidth>
  static __device__ __forceinline__ void stage_round(
      S& s, const Sums<kWidth>& sum, int first, uint32_t thread, const Place& at) {
    if (first == 0) wait_for_row_scales(at);
    const uint32_t to = ptx::shared_address(s.staging[at.warpgroup]) +
                        thread % 4 * 2 * S::kPitch + thread % 128 / 4 * 8;
    ptx::barrier_sync<256>(1);  // the rows staged before are read
#pragma unroll
    for (int j = 0; j < kRound<kWidth> / 8; ++j) {
      uint32_t words[2][kBlocks];
      scaled<kWidth>(sum, first / 8 + j, at, words);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        ptx::store_uint2(to + (8 * j + i) * S::kPitch, make_uint2(words[i][0], words[i][1]));
      }
    }
    ptx::barrier_sync<256>(1);
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
      stage_round<kWidth>(s, sum, first, thread, at);
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
