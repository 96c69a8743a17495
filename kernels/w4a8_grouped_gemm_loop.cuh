// Sums of a tile: products of the matrix unit, scaled group by group of columns, all in float16.
//
// Two sums are one register and one float instruction, and beside a matrix unit that keeps them so
// float instructions cost it less. What is summed stays of one size: weights are at most 1/32 in
// e4m3, scales shares of powers of two (units), a row's of its largest, a token's of its largest so
// far. kSpan groups are summed before they are added to those before, which halves what rounding
// adds.
#pragma once

#include <stddef.h>

#include "w4a8_grouped_gemm_operands.cuh"
#include "w4a8_grouped_gemm_ptx.cuh"
#include "w4a8_grouped_gemm_tiles.cuh"

namespace w4a8 {

// By the two computing warpgroups, in the form F of tiles.
template <typename F>
struct Loop {
  static constexpr int kBlocks = F::kNumBlocks;
  static constexpr bool kByRow = F::kHasRowScales;
  using S = typename F::S;
  using Ring = typename F::Ring;
  using Place = typename F::Place;
  template <int kWidth>
  using Sums = typename F::template Sums<kWidth>;
  using Scales = TokenScales<F::kMostTokens>;

  // What scales a weight half's products: its rows' scales, as pairs of the same, and its tokens'.
  template <int kWidth>
  struct Factors {
    static constexpr int kVectors = (kWidth + 31) / 32;
    uint32_t upper, lower;
    uint4 token[kByRow ? 1 : kVectors];

    __device__ __forceinline__ void load_rows(int stage, const Place& at, int half) {
      const uint32_t from = rows_of(stage, at, half);
      upper = ptx::both_low_halves(ptx::load_word(from));
      lower = ptx::both_low_halves(ptx::load_word(from + 32));
    }

    __device__ __forceinline__ void load_tokens(int stage, const Place& at) {
      if constexpr (!kByRow) load_vectors<kVectors>(token, tokens_of(stage, at));
    }

    // Of a pair of tokens, in front of what hangs on the products.
    __device__ __forceinline__ uint32_t of(int i) const {
      const uint32_t row = i % 2 ? lower : upper;
      if constexpr (kByRow) return row;
      return ptx::multiply_pairs(word(token, i / 2), row);
    }
  };

  static __device__ __forceinline__ uint32_t rows_of(int stage, const Place& at, int half) {
    return at.rows + stage * (kBlocks * kBlockBytes) + half * 256;
  }

  static __device__ __forceinline__ uint32_t tokens_of(int stage, const Place& at) {
    return at.tokens + stage * static_cast<int>(sizeof(Scales));
  }

  template <int kVectors>
  static __device__ __forceinline__ void load_vectors(uint4* to, uint32_t from) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) to[i] = ptx::load_uint4(from + i * 64);
  }

  static __device__ __forceinline__ uint32_t word(const uint4* vectors, int i) {
    const uint4 four = vectors[i / 4];
    return i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
  }

  // The first group's weight scales of this thread's first row: its sign says how codes are read.
  static __device__ __forceinline__ bool is_signed(int stage, const Place& at) {
    return static_cast<int>(ptx::load_word(rows_of(stage, at, 0))) < 0;
  }

  static __device__ __forceinline__ void wait_full(S& s, const Ring& ring) {
    ptx::barrier_wait(ptx::shared_address(&s.full[ring.stage]), ring.parity);
  }

  static __device__ __forceinline__ void release(S& s, int stage, const Place& at) {
    __syncwarp();
    if (at.lane == 0) ptx::barrier_arrive(ptx::shared_address(&s.empty[stage]));
  }

  template <int kWidth>
  static __device__ __forceinline__ void issue(
      S& s, uint32_t (&part)[kWidth / 4], const uint32_t (&a)[16], int stage) {
    const uint64_t b = ptx::operand(ptx::shared_address(s.activations[stage]));
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::WgmmaHalf<kWidth>::issue(part, a + 4 * i, b + 2 * i, i > 0);
    ptx::wgmma_commit();
  }

  static __device__ __forceinline__ Codes load_half(int stage, const Place& at, int half) {
    uint32_t from = at.codes + stage * (kBlocks * kBlockBytes) + half * kHalfBytes;
    ptx::keep(from);
    return load_codes(from);
  }

  // sum (+)= part, scaled.
  template <int kWidth>
  static __device__ __forceinline__ void add_scaled(
      uint32_t (&sum)[kWidth / 4], uint32_t (&part)[kWidth / 4], const Factors<kWidth>& factors,
      bool is_first) {
    ptx::pin(part);
#pragma unroll
    for (int i = 0; i < kWidth / 4; ++i) {
      const uint32_t factor = factors.of(i);
      sum[i] = is_first ? ptx::multiply_pairs(part[i], factor)
                        : ptx::add_products(part[i], factor, sum[i]);
    }
  }

  // total = total, in the unit of this span, + sum.
  template <int kWidth>
  static __device__ __forceinline__ void add_span(
      Sums<kWidth>& total, const uint32_t (&sum)[kBlocks][kWidth / 4], int stage,
      const Place& at) {
    uint4 carry[Factors<kWidth>::kVectors];
    if constexpr (!kByRow) {
      load_vectors<Factors<kWidth>::kVectors>(
          carry, tokens_of(stage, at) + static_cast<int>(offsetof(Scales, carry)));
    }
#pragma unroll
    for (int h = 0; h < kBlocks; ++h) {
#pragma unroll
      for (int i = 0; i < kWidth / 4; ++i) {
        uint32_t& to = total.pair[h][i];
        if constexpr (kByRow) to = ptx::add_pairs(to, sum[h][i]);
        else to = ptx::add_products(to, word(carry, i / 2), sum[h][i]);
      }
    }
  }

  // Wide tiles have one accumulator, the matrix unit has the other warpgroup's while it is added.
  // Others have two, one in flight while the other is added.
  template <int kWidth, int kGroups>
  static constexpr int kFlights = kWidth > 64 || kGroups * kBlocks == 1 ? 1 : 2;

  // kGroups groups of columns, their weight halves in turn. At entry `a[0]` holds the operands of
  // the first half and `factors` what its products are scaled by; where `more`, those of the group
  // behind are left there. The last group's stage, which is returned, is not released.
  //
  // NOTE: matrix instructions in flight from one pass of a loop to the next would be waited for one
  // by one; so all of a call are its own.
  template <int kWidth, bool kSigned, int kGroups>
  static __device__ __forceinline__ int add_groups(
      S& s, Ring& ring, const Place& at, Sums<kWidth>& total, uint32_t (&a)[2][16],
      Factors<kWidth>& factors, bool more) {
    constexpr int kSteps = kGroups * kBlocks, kFlight = kFlights<kWidth, kGroups>;
    uint32_t sum[kBlocks][kWidth / 4];
    uint32_t part[kFlight][kWidth / 4] = {};  // else the compiler makes their instructions wait
    int stage[kGroups + 1];
    stage[0] = ring.stage;
    // The codes of a step's half, the first behind this call included.
    const auto fetch = [&](int step) __attribute__((always_inline)) {
      const int group = step / kBlocks;
      if (step % kBlocks == 0) {
        ring.advance();
        stage[group] = ring.stage;
        if (step < kSteps || more) wait_full(s, ring);
      }
      return load_half(stage[group], at, step % kBlocks);  // of no use behind the last group
    };
    if constexpr (kFlight == 2) {
      issue<kWidth>(s, part[0], a[0], stage[0]);
      decode<kSigned>(fetch(1), a[1]);
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int next = i + 1, group = i / kBlocks;
      if constexpr (kFlight == 2) {
        if (next < kSteps) {
          issue<kWidth>(s, part[next % 2], a[next % 2], stage[next / kBlocks]);
          const Codes codes = fetch(next + 1);
          ptx::wgmma_wait<1>();
          add_scaled<kWidth>(sum[i % kBlocks], part[i % 2], factors, group == 0);
          decode<kSigned>(codes, a[i % 2]);
        } else {
          ptx::wgmma_wait<0>();
          add_scaled<kWidth>(sum[i % kBlocks], part[i % 2], factors, group == 0);
        }
      } else {
        issue<kWidth>(s, part[0], a[0], stage[group]);
        const Codes codes = fetch(next);
        ptx::wgmma_wait<0>();
        decode<kSigned>(codes, a[0]);
        add_scaled<kWidth>(sum[i % kBlocks], part[0], factors, group == 0);
      }
      factors.load_rows(stage[next / kBlocks], at, next % kBlocks);
      if (next % kBlocks == 0) {
        factors.load_tokens(stage[next / kBlocks], at);
        if (next < kSteps) release(s, stage[group], at);
      }
    }
    add_span<kWidth>(total, sum, stage[kGroups - 1], at);
    return stage[kGroups - 1];
  }

  // Sums of a tile, once its first group of columns is there.
  template <int kWidth, bool kSigned>
  static __device__ __forceinline__ void add_all(
      S& s, int num_groups, Ring& ring, const Place& at, Sums<kWidth>& total) {
#pragma unroll
    for (auto& half : total.pair) {
#pragma unroll
      for (uint32_t& pair : half) pair = 0;
    }
    uint32_t a[2][16];
    Factors<kWidth> factors;
    decode<kSigned>(load_half(ring.stage, at, 0), a[0]);
    factors.load_rows(ring.stage, at, 0);
    factors.load_tokens(ring.stage, at);
    int stage, left = num_groups;
    for (; left >= kSpan; left -= kSpan) {
      stage = add_groups<kWidth, kSigned, kSpan>(s, ring, at, total, a, factors, left > kSpan);
      if (left > kSpan) release(s, stage, at);
    }
    for (; left; --left) {
      stage = add_groups<kWidth, kSigned, 1>(s, ring, at, total, a, factors, left > 1);
      if (left > 1) release(s, stage, at);
    }
    load_units<kWidth>(stage, at, total);
    release(s, stage, at);
  }

  // Of the tile's rows and tokens, which its last group's stage has.
  template <int kWidth>
  static __device__ __forceinline__ void load_units(
      int stage, const Place& at, Sums<kWidth>& total) {
#pragma unroll
    for (int h = 0; h < kBlocks; ++h) {
      const uint32_t from = rows_of(stage, at, h);
      total.row[h][0] = __uint_as_float(ptx::load_word(from) & 0xFFFF0000u);
      total.row[h][1] = __uint_as_float(ptx::load_word(from + 32) & 0xFFFF0000u);
    }
    if constexpr (!kByRow) {
      constexpr int kVectors = Factors<kWidth>::kVectors;
      uint4 unit[kVectors];
      load_vectors<kVectors>(
          unit, tokens_of(stage, at) + static_cast<int>(offsetof(Scales, unit)));
#pragma unroll
      for (int j = 0; j < kWidth / 8; ++j) total.token[j] = word(unit, j);
    }
  }
};

}  // namespace w4a8
