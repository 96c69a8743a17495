// Sums of a tile: products of the matrix unit, scaled group by group of columns, all in float16.
//
// Two sums are one register and one float instruction, and beside a matrix unit that keeps them so
// float instructions cost it less. What is summed stays of one size: weights are at most 1/32 in
// e4m3, scales shares of powers of two (units), a row's of its largest, a token's of its largest so
// far. kSpan groups are summed before they are added to those before, which halves what rounding
// adds; where the last span has fewer, zeros are the rest.
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
  using Spans = typename F::Spans;
  using Place = typename F::Place;
  template <int kWidth>
  using Sums = typename F::template Sums<kWidth>;
  using Scales = TokenScales<F::kMostTokens>;

  // Scales of a weight half's rows, as pairs of the same.
  struct RowFactors {
    uint32_t upper, lower;

    __device__ __forceinline__ void load(int stage, const Place& at, int half) {
      const uint32_t from = rows_of(stage, at, half);
      upper = ptx::both_low_halves(ptx::load_half_word(from));
      lower = ptx::both_low_halves(ptx::load_half_word(from + 2));
    }
  };

  // Tokens' scales for a group of columns. The matrix unit spreads them over threads as it does
  // products: rows r of its operand choose the group of half of the tokens, rows r + 8 that of the
  // others, or of the same where there are only eight. Loads from shared memory, of which products
  // leave little, would be eight times as many.
  template <int kWidth>
  struct TokenFactors {
    static constexpr bool kHalves = kWidth > 8;
    static constexpr int kColumns = kHalves ? kWidth / 2 : kWidth;
    uint32_t choice[4];
    uint32_t spread[kColumns / 4] = {};

    // After what is in flight and before the next products: it is there with the former.
    __device__ __forceinline__ void begin(int group, uint32_t shares, const Place& at) {
      // 1 in float16, in its half of the word that has the group; shifted out of the other words.
      const uint32_t one = ptx::shift_left(0x3C00, 16 * (group - at.lane % 4 * 2));
      choice[0] = one;
      choice[1] = kHalves ? 0 : one;
      choice[2] = 0;
      choice[3] = kHalves ? one : 0;
#pragma unroll
      for (uint32_t& pair : choice) ptx::keep(pair);
      ptx::wgmma_fence();
      ptx::WgmmaHalf<ptx::HalfOfHalf, kColumns>::issue(
          spread, choice, ptx::operand_of_pieces(shares, kColumns * 16), 0);
      ptx::wgmma_commit();
    }

    // Of the i-th pair of tokens and rows.
    __device__ __forceinline__ uint32_t of(int i) const {
      if constexpr (!kHalves) return spread[i];
      const int j = i / 2, eights = kColumns / 8;
      return spread[j < eights ? 2 * j : 2 * (j - eights) + 1];
    }
  };

  static __device__ __forceinline__ uint32_t rows_of(int stage, const Place& at, int half) {
    return at.rows + stage * (kBlocks * kBlockBytes) + half * 4;
  }

  // This thread's words of so many tokens.
  template <int kWidth>
  struct Words {
    static constexpr int kVectors = (kWidth + 31) / 32;
    uint4 vector[kVectors];

    __device__ __forceinline__ void load(uint32_t from) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) vector[i] = ptx::load_uint4(from + i * 64);
    }

    __device__ __forceinline__ uint32_t of(int i) const {
      const uint4 four = vector[i / 4];
      return i % 4 == 0 ? four.x : i % 4 == 1 ? four.y : i % 4 == 2 ? four.z : four.w;
    }
  };

  static __device__ __forceinline__ uint32_t carries_of(int span, const Place& at) {
    return at.tokens + span * static_cast<int>(sizeof(Scales));
  }

  static __device__ __forceinline__ uint32_t units_of(int span, const Place& at) {
    constexpr int kBehind = offsetof(Scales, unit) - offsetof(Scales, carry);
    return carries_of(span, at) + kBehind;
  }

  // The first group's weight scales of this thread's first row: its sign says how codes are read.
  static __device__ __forceinline__ bool is_signed(int stage, const Place& at) {
    return ptx::load_half_word(rows_of(stage, at, 0)) & 0x8000;
  }

  static __device__ __forceinline__ void wait_full(S& s, const Ring& ring) {
    ptx::barrier_wait(ptx::shared_address(&s.full[ring.stage]), ring.parity);
  }

  static __device__ __forceinline__ void release(const uint64_t& empty, const Place& at) {
    __syncwarp();
    if (at.lane == 0) ptx::barrier_arrive(ptx::shared_address(&empty));
  }

  template <int kWidth>
  static __device__ __forceinline__ void issue(
      S& s, uint32_t (&part)[kWidth / 4], const uint32_t (&a)[16], int stage) {
    const uint64_t b = ptx::operand(ptx::shared_address(s.activations[stage]));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::WgmmaHalf<ptx::HalfOfE4m3, kWidth>::issue(part, a + 4 * i, b + 2 * i, i > 0);
    }
    ptx::wgmma_commit();
  }

  static __device__ __forceinline__ Codes load_half(int stage, const Place& at, int half) {
    uint32_t from = at.codes + stage * (kBlocks * kBlockBytes) + half * kHalfBytes;
    ptx::keep(from);
    return load_codes(from);
  }

  template <int kPairs>
  static __device__ __forceinline__ void clear(uint32_t (&sum)[kBlocks][kPairs]) {
#pragma unroll
    for (auto& half : sum) {
#pragma unroll
      for (uint32_t& pair : half) pair = 0;
    }
  }

  // sum (+)= part, scaled.
  template <int kWidth>
  static __device__ __forceinline__ void add_scaled(
      uint32_t (&sum)[kWidth / 4], uint32_t (&part)[kWidth / 4], const RowFactors& rows,
      TokenFactors<kWidth>& tokens, bool is_first) {
    ptx::pin(part);
    if constexpr (!kByRow) ptx::pin(tokens.spread);
#pragma unroll
    for (int i = 0; i < kWidth / 4; ++i) {
      const uint32_t row = i % 2 ? rows.lower : rows.upper;
      const uint32_t factor = kByRow ? row : ptx::multiply_pairs(tokens.of(i), row);
      sum[i] = is_first ? ptx::multiply_pairs(part[i], factor)
                        : ptx::add_products(part[i], factor, sum[i]);
    }
  }

  // total = total, in the unit of this span, + sum.
  template <int kWidth>
  static __device__ __forceinline__ void add_span(
      Sums<kWidth>& total, const uint32_t (&sum)[kBlocks][kWidth / 4], int span,
      const Place& at) {
    Words<kWidth> carry;
    if constexpr (!kByRow) carry.load(carries_of(span, at));
#pragma unroll
    for (int h = 0; h < kBlocks; ++h) {
#pragma unroll
      for (int i = 0; i < kWidth / 4; ++i) {
        uint32_t& to = total.pair[h][i];
        if constexpr (kByRow) to = ptx::add_pairs(to, sum[h][i]);
        else to = ptx::add_products(to, carry.of(i / 2), sum[h][i]);
      }
    }
  }

  // Of few tokens there are two accumulators, one in flight while the other is added.
  //
  // Groups of a span that a pass of their loop has. Fewer than 33 tokens wait for memory and gain
  // nothing by long code; but in a model other kernels' takes its place in the cache between two
  // launches.
  template <int kWidth>
  static constexpr int kPass = kWidth > 32 ? kSpan : 2;

  // Adds kPass groups of columns of a span, from `first` on, to its `sum`; their weight halves in
  // turn. At entry `a[0]` holds the operands of the first half and `rows` what its products are
  // scaled by; where `more`, those of the next group are left there. The last group's stage, which
  // is returned, is not released.
  //
  // NOTE: matrix instructions in flight from one pass of a loop to the next would be waited for one
  // by one; so all of a call are its own.
  template <int kWidth, bool kSigned>
  static __device__ __forceinline__ int add_groups(
      S& s, Ring& ring, const Spans& spans, const Place& at, uint32_t (&sum)[kBlocks][kWidth / 4],
      uint32_t (&a)[2][16], RowFactors& rows, int first, bool more) {
    constexpr int kGroups = kPass<kWidth>, kSteps = kGroups * kBlocks;
    // Initialised, as `spread` is: else the compiler makes their instructions wait.
    uint32_t part[2][kWidth / 4] = {};
    TokenFactors<kWidth> tokens;
    int stage[kGroups + 1];
    stage[0] = ring.stage;
    const uint32_t shares = ptx::shared_address(s.scales[spans.stage].shares);
    const auto begin = [&](int step) __attribute__((always_inline)) {
      ptx::wgmma_fence();
      issue<kWidth>(s, part[step % 2], a[step % 2], stage[step / kBlocks]);
    };
    // The codes of a step's half, the first after this call included.
    const auto fetch = [&](int step) __attribute__((always_inline)) {
      const int group = step / kBlocks;
      if (step % kBlocks == 0) {
        ring.advance();
        stage[group] = ring.stage;
        if (step < kSteps || more) wait_full(s, ring);
      }
      return load_half(stage[group], at, step % kBlocks);  // of no use after the last group
    };
    begin(0);
    decode<kSigned>(fetch(1), a[1]);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const int next = i + 1, group = i / kBlocks;
      const bool is_first = kGroups == kSpan && group == 0;  // else `sum` is zeros
      if (!kByRow && i % kBlocks == 0) tokens.begin(first + group, shares, at);
      if (next < kSteps) {
        begin(next);
        const Codes codes = fetch(next + 1);
        ptx::wgmma_wait<1>();
        add_scaled<kWidth>(sum[i % kBlocks], part[i % 2], rows, tokens, is_first);
        decode<kSigned>(codes, a[i % 2]);
      } else {
        ptx::wgmma_wait<0>();
        add_scaled<kWidth>(sum[i % kBlocks], part[i % 2], rows, tokens, is_first);
      }
      rows.load(stage[next / kBlocks], at, next % kBlocks);
      if (next % kBlocks == 0 && next < kSteps) release(s.empty[stage[group]], at);
    }
    return stage[kGroups - 1];
  }

  // Of more tokens there is one accumulator; the matrix unit has the other warpgroup's while it is
  // added.
  template <int kWidth>
  static constexpr bool kInTurn = kWidth > 64;

  // `add_groups` of a whole span, whose sum begins with its first group. Of code there are three
  // groups, which the cache of instructions has room for. The loop turns over between the end of a
  // product and its addition, beside which the next is prepared.
  template <int kWidth, bool kSigned>
  static __device__ __forceinline__ int add_span_in_turn(
      S& s, Ring& ring, const Spans& spans, const Place& at, uint32_t (&sum)[kBlocks][kWidth / 4],
      uint32_t (&a)[16], RowFactors& rows, bool more) {
    uint32_t part[kWidth / 4] = {};  // initialised, as above
    TokenFactors<kWidth> tokens;
    Codes codes;
    int stage = ring.stage;
    const uint32_t shares = ptx::shared_address(s.scales[spans.stage].shares);
    const auto multiply = [&](int half, int group) __attribute__((always_inline)) {
      if (!kByRow && half == 0) tokens.begin(group, shares, at);
      ptx::wgmma_fence();
      issue<kWidth>(s, part, a, stage);
      if (half + 1 == kBlocks) {
        ring.advance();
        if (group + 1 < kSpan || more) wait_full(s, ring);
      }
      codes = load_half(ring.stage, at, (half + 1) % kBlocks);  // of no use after the last group
      ptx::wgmma_wait<0>();
    };
    // The product of a group's first half being there, the rest of it.
    const auto finish = [&](int group, bool is_first, bool is_last) __attribute__((always_inline)) {
#pragma unroll
      for (int half = 0; half < kBlocks; ++half) {
        if (half > 0) multiply(half, group);
        decode<kSigned>(codes, a);
        add_scaled<kWidth>(sum[half], part, rows, tokens, is_first);
        rows.load(ring.stage, at, (half + 1) % kBlocks);
      }
      if (is_last) return;
      release(s.empty[stage], at);
      stage = ring.stage;
    };
    multiply(0, 0);
    finish(0, true, false);
    multiply(0, 1);
#pragma unroll 1
    for (int group = 1; group < kSpan - 1; ++group) {
      finish(group, false, false);
      multiply(0, group + 1);
    }
    finish(kSpan - 1, false, true);
    return stage;
  }

  // Sums of a tile, once its first group of columns is there.
  template <int kWidth, bool kSigned>
  static __device__ __forceinline__ void add_all(
      S& s, int num_groups, Ring& ring, Spans& spans, const Place& at, Sums<kWidth>& total) {
    clear(total.pair);
    uint32_t a[kInTurn<kWidth> ? 1 : 2][16];
    RowFactors rows;
    decode<kSigned>(load_half(ring.stage, at, 0), a[0]);
    rows.load(ring.stage, at, 0);
    const auto leave = [&](int stage) __attribute__((always_inline)) {
      release(s.empty[stage], at);
      if constexpr (!kByRow) {
        release(s.scales_empty[spans.stage], at);
        spans.advance();
      }
    };
    int stage;
    for (int done = 0; done < num_groups; done += kSpan) {
      const bool more = done + kSpan < num_groups;
      if constexpr (!kByRow) {
        ptx::barrier_wait(ptx::shared_address(&s.scales_full[spans.stage]), spans.parity);
      }
      uint32_t sum[kBlocks][kWidth / 4];
      if constexpr (kInTurn<kWidth>) {
        stage = add_span_in_turn<kWidth, kSigned>(s, ring, spans, at, sum, a[0], rows, more);
      } else {
        if constexpr (kPass<kWidth> != kSpan) clear(sum);
#pragma unroll 1
        for (int first = 0;; first += kPass<kWidth>) {
          const bool is_last = first + kPass<kWidth> == kSpan;
          stage = add_groups<kWidth, kSigned>(
              s, ring, spans, at, sum, a, rows, first, more || !is_last);
          if (is_last) break;
          release(s.empty[stage], at);
        }
      }
      add_span<kWidth>(total, sum, spans.stage, at);
      if (more) leave(stage);
    }
    load_units<kWidth>(stage, spans.stage, at, total);
    leave(stage);
  }

  // Of the tile's rows and tokens, which its last group has.
  template <int kWidth>
  static __device__ __forceinline__ void load_units(
      int stage, int span, const Place& at, Sums<kWidth>& total) {
#pragma unroll
    for (int h = 0; h < kBlocks; ++h) {
      total.row[h] = ptx::load_word(rows_of(stage, at, h) + kShareBytes);
    }
    if constexpr (!kByRow) {
      Words<kWidth> unit;
      unit.load(units_of(span, at));
#pragma unroll
      for (int j = 0; j < kWidth / 8; ++j) total.token[j] = unit.of(j);
    }
  }
};

}  // namespace w4a8
