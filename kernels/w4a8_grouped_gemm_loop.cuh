// Sums of a tile: products of the matrix unit, scaled group by group of columns.
#pragma once

#include "w4a8_grouped_gemm_operands.cuh"
#include "w4a8_grouped_gemm_ptx.cuh"
#include "w4a8_grouped_gemm_tiles.cuh"

namespace w4a8 {

// NOTE: matrix instructions in flight from one pass of a loop to the next would be waited for one
// by one; so a pass has several groups of columns.
constexpr int kGroupsAPass = 2;
static_assert(kGroupsAPass == 2, "`steps` leaves operands where it found them, and one group more");
constexpr int kGroupsAPassByRow = 4;

// By the two computing warpgroups, in the form F of tiles.
template <typename F>
struct Loop {
  static constexpr int kBlocks = F::kNumBlocks;
  static constexpr bool kByRow = F::kHasRowScales;
  using S = typename F::S;
  using Ring = typename F::Ring;
  using Place = typename F::Place;
  template <int kWidth>
  using Pieces = typename F::template Pieces<kWidth>;
  template <int kWidth>
  using Sums = typename F::template Sums<kWidth>;

  // Scales of this thread's rows in both blocks, and of its tokens unless those are one a row.
  template <int kColumns>
  struct Scales {
    static constexpr int kVectors = kColumns < 16 ? 1 : kColumns / 16;
    float upper[2], lower[2];
    float4 token[kVectors];

    __device__ __forceinline__ void load(int stage, const Place& at) {
      load_rows(stage, at, 0, upper[0], lower[0]);
      load_rows(stage, at, 1, upper[1], lower[1]);
      if constexpr (kByRow) return;
      const uint32_t from = at.tokens + stage * (S::kScalePitch * 16);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if constexpr (kColumns == 8) {  // two floats: 8-byte aligned
          token[i].x = ptx::load_float(from);
          token[i].y = ptx::load_float(from + 4);
        } else {
          token[i] = ptx::load_float4(from + i * 16);
        }
      }
    }
  };

  static __device__ __forceinline__ void load_rows(
      int stage, const Place& at, int half, float& upper, float& lower) {
    const uint32_t from = at.rows + stage * (kBlocks * kBlockBytes) + half * 256;
    upper = ptx::load_float(from);
    lower = ptx::load_float(from + 32);
  }

  // The two warpgroups issue in turns: one has the matrix unit while the other scales.
  static __device__ __forceinline__ void take_turn(const Place& at) {
    ptx::barrier_sync<256>(3 + at.warpgroup);
  }

  static __device__ __forceinline__ void pass_turn(const Place& at) {
    ptx::barrier_pass<256>(4 - at.warpgroup);
  }

  static __device__ __forceinline__ void wait_full(S& s, const Ring& ring) {
    ptx::barrier_wait(ptx::shared_address(&s.full[ring.stage]), ring.parity);
  }

  template <int kColumns>
  static __device__ __forceinline__ void issue(
      float (&part)[kColumns / 2], const uint32_t (&a)[16], uint64_t b) {
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) ptx::Wgmma<kColumns>::issue(part, a + 4 * i, b + 2 * i, i > 0);
    ptx::wgmma_commit();
  }

  // sum += part, scaled by row, and by token where its scales are not left to the end: eight
  // tokens, two of them this lane's. With one block a tile first by token: `part` is free for the
  // next matrix instruction before the sums are there.
  static __device__ __forceinline__ void add_scaled(
      float* sum, const float* part, float upper, float lower, float left, float right) {
    if constexpr (kByRow) {
      sum[0] += part[0] * upper;
      sum[1] += part[1] * upper;
      sum[2] += part[2] * lower;
      sum[3] += part[3] * lower;
    } else if constexpr (kBlocks == 1) {
      sum[0] += part[0] * left * upper;
      sum[1] += part[1] * right * upper;
      sum[2] += part[2] * left * lower;
      sum[3] += part[3] * right * lower;
    } else {
      sum[0] += part[0] * (upper * left);
      sum[1] += part[1] * (upper * right);
      sum[2] += part[2] * (lower * left);
      sum[3] += part[3] * (lower * right);
    }
  }

  template <int kColumns, int kVectors>
  static __device__ __forceinline__ void add_scaled(
      float (&sum)[kColumns / 2], float (&part)[kColumns / 2], const float4 (&token)[kVectors],
      float upper, float lower) {
    ptx::pin(part);
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float4 four = token[j / 2];
      add_scaled(sum + 4 * j, part + 4 * j, upper, lower, j % 2 ? four.z : four.x,
                 j % 2 ? four.w : four.y);
    }
  }

  template <int kColumns>
  static __device__ __forceinline__ void add_rows(
      float* sum, float (&part)[kColumns / 2], float upper, float lower) {
    ptx::pin(part);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) sum[i] += part[i] * (i % 4 < 2 ? upper : lower);
  }

  static __device__ __forceinline__ void release(uint32_t empty, const Place& at) {
    __syncwarp();
    if (at.lane == 0) ptx::barrier_arrive(empty);
  }

  // kGroups groups of columns, two weight halves each, one of them in flight while the other is
  // scaled. At entry `a` holds the operands of the first half, `codes` the codes of the second,
  // `scales` what both need; where `more`, those of the group behind are left there.
  template <int kWidth, bool kSigned, int kGroups>
  static __device__ __forceinline__ void steps_halves(
      S& s, Ring& ring, const Place& at, float (&sum)[2][kWidth / 2], uint32_t (&a)[16],
      uint32_t (&b)[16], Codes& codes, Scales<kWidth>& scales, bool more) {
    float even[kWidth / 2], odd[kWidth / 2];
    uint64_t tokens = ptx::operand(ptx::shared_address(s.activations[ring.stage]));
    issue<kWidth>(even, a, tokens);
#pragma unroll
    for (int g = 1; g <= kGroups; ++g) {
      const uint32_t empty = ptx::shared_address(&s.empty[ring.stage]);
      const bool next = g < kGroups || more;
      decode<kSigned>(codes, b);
      issue<kWidth>(odd, b, tokens);
      ring.advance();
      uint32_t half = at.codes + ring.stage * (kBlocks * kBlockBytes);
      ptx::keep(half);
      if (next) {
        wait_full(s, ring);
        codes = load_codes(half);
      }
      ptx::wgmma_wait<1>();
      add_scaled<kWidth>(sum[0], even, scales.token, scales.upper[0], scales.lower[0]);
      if (next) {
        decode<kSigned>(codes, a);
        codes = load_codes(half + kHalfBytes);
      }
      if (g < kGroups) {
        tokens = ptx::operand(ptx::shared_address(s.activations[ring.stage]));
        issue<kWidth>(even, a, tokens);
        ptx::wgmma_wait<1>();
      } else {
        ptx::wgmma_wait<0>();
      }
      add_scaled<kWidth>(sum[1], odd, scales.token, scales.upper[1], scales.lower[1]);
      release(empty, at);
      if (next) scales.load(ring.stage, at);
    }
  }

  // One group of columns, one weight half. At entry `a` holds its operands, `upper` and `lower` the
  // scales of this thread's rows; where `more`, those of the next group are left in `next` and
  // them.
  template <int kWidth, bool kSigned>
  static __device__ __forceinline__ void step_tokens(
      S& s, Ring& ring, const Place& at, float (&sum)[kWidth / 2], uint32_t (&a)[16],
      uint32_t (&next)[16], float& upper, float& lower, bool more) {
    constexpr int kVectors = kWidth / 16;
    constexpr int kAhead = kVectors < 2 ? kVectors : 2;  // scales of tokens loaded before use
    const int stage = ring.stage;
    const uint64_t tokens = ptx::operand(ptx::shared_address(s.activations[stage]));
    const uint32_t from = at.tokens + stage * (S::kScalePitch * 16);
    ring.advance();
    const uint32_t half = at.codes + ring.stage * (kBlocks * kBlockBytes);
    float part[kWidth / 2];
    float4 token[kAhead];
    take_turn(at);
    issue<kWidth>(part, a, tokens);
    pass_turn(at);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) token[j] = ptx::load_float4(from + j * 16);
    if (more) {
      wait_full(s, ring);
      decode<kSigned>(load_codes(half), next);
    }
    ptx::wgmma_wait<0>();
    ptx::pin(part);
#pragma unroll
    for (int j = 0; j < kVectors; ++j) {
      const float4 four = token[j % kAhead];
      if (j + kAhead < kVectors) token[j % kAhead] = ptx::load_float4(from + (j + kAhead) * 16);
      add_scaled(sum + 8 * j, part + 8 * j, upper, lower, four.x, four.y);
      add_scaled(sum + 8 * j + 4, part + 8 * j + 4, upper, lower, four.z, four.w);
    }
    release(ptx::shared_address(&s.empty[stage]), at);
    if (more) load_rows(ring.stage, at, 0, upper, lower);
  }

  // kGroups groups of columns of several pieces, two of them in flight. At entry `a[0]` holds the
  // operands of the first group; where `more`, those of the group behind are left there.
  template <int kWidth, bool kSigned, int kGroups>
  static __device__ __forceinline__ void steps(
      S& s, Ring& ring, const Place& at, Sums<kWidth>& sum,
      uint32_t (&a)[2][16], bool more) {
    constexpr int kColumns = Pieces<kWidth>::kColumns, kNumber = Pieces<kWidth>::kNumber;
    constexpr int kPieces = kGroups * kNumber;
    constexpr int kVectors = kColumns / 16;  // of a lane's scales of a piece's tokens
    constexpr int kAhead = 2;                // of them loaded before use
    constexpr uint64_t kStride = kColumns * kGroup >> 4;  // of a piece's tokens in descriptors
    float part[2][kColumns / 2];
    float4 token[kAhead];
    int stage = ring.stage;
    uint64_t tokens = ptx::operand(ptx::shared_address(s.activations[stage]));
    uint32_t from = scales_of_tokens(stage, at), next_from = from;
    float upper, lower, next_upper, next_lower;
    issue<kColumns>(part[0], a[0], tokens);
    load_rows(stage, at, 0, next_upper, next_lower);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) token[j] = ptx::load_float4(from + j * 16);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int group = i / kNumber, next = (i + 1) % kNumber;
      if (i % kNumber == 0) upper = next_upper, lower = next_lower, from = next_from;
      if (i + 1 < kPieces) {
        if (next == 0) {
          tokens = ptx::operand(ptx::shared_address(s.activations[ring.stage]));
          next_from = scales_of_tokens(ring.stage, at);
          load_rows(ring.stage, at, 0, next_upper, next_lower);
        }
        issue<kColumns>(part[(i + 1) % 2], a[(i + 1) / kNumber % 2], tokens + next * kStride);
      }
      if (next == kNumber - 1) {  // the other operands are free
        ring.advance();
        if (group + 1 < kGroups || more) wait_full(s, ring);
        expand<kSigned>(ring, at, a[(group + 1) % 2]);
      }
      if (i + 1 < kPieces) ptx::wgmma_wait<1>();
      else ptx::wgmma_wait<0>();
      float (&own)[kColumns / 2] = part[i % 2];
      ptx::pin(own);
#pragma unroll
      for (int j = 0; j < kVectors; ++j) {
        const float4 four = token[j % kAhead];
        const int then = i * kVectors + j + kAhead;  // of the pass
        if (then < kPieces * kVectors) {
          token[j % kAhead] = ptx::load_float4(
              (then / (kNumber * kVectors) > group ? next_from : from) +
              then % (kNumber * kVectors) * 16);
        }
        float* to = sum[0] + i % kNumber * (kColumns / 2) + 8 * j;
        add_scaled(to, own + 8 * j, upper, lower, four.x, four.y);
        add_scaled(to + 4, own + 8 * j + 4, upper, lower, four.z, four.w);
      }
      if (next == 0) {
        release(ptx::shared_address(&s.empty[stage]), at);
        stage = ring.stage;
      }
    }
  }

  // Where the scales of this lane's tokens are, in a register of their own: else each address that
  // is a constant apart would be.
  static __device__ __forceinline__ uint32_t scales_of_tokens(int stage, const Place& at) {
    uint32_t from = at.tokens + stage * (S::kScalePitch * 16);
    ptx::keep(from);
    return from;
  }

  // One group of columns, one piece after the other; the matrix unit has the other warpgroup's
  // meanwhile. At entry `a` holds the operands of the first half; where `more`, those of the next
  // group's are left there.
  template <int kWidth, bool kSigned>
  static __device__ __forceinline__ void step_whole(
      S& s, Ring& ring, const Place& at, Sums<kWidth>& sum, uint32_t (&a)[16], bool more) {
    constexpr int kColumns = Pieces<kWidth>::kColumns, kNumber = Pieces<kWidth>::kNumber;
    constexpr uint64_t kStride = kColumns * kGroup >> 4;  // of a piece's tokens in descriptors
    const int stage = ring.stage;
    const uint64_t tokens = ptx::operand(ptx::shared_address(s.activations[stage]));
    const uint32_t half = at.codes + stage * (kBlocks * kBlockBytes);
    ring.advance();
    float part[kColumns / 2];
    float upper, lower;
    Codes codes;
#pragma unroll
    for (int h = 0; h < kBlocks; ++h) {
#pragma unroll
      for (int i = 0; i < kNumber; ++i) {
        issue<kColumns>(part, a, tokens + i * kStride);
        if (i == 0) load_rows(stage, at, h, upper, lower);
        if (i + 1 == kNumber) {
          if (h + 1 < kBlocks) {
            codes = load_codes(half + kHalfBytes);
          } else {
            if (more) wait_full(s, ring);
            uint32_t next = at.codes + ring.stage * (kBlocks * kBlockBytes);
            ptx::keep(next);
            codes = load_codes(next);  // of no use behind the last group
          }
        }
        ptx::wgmma_wait<0>();
        if (i + 1 == kNumber) decode<kSigned>(codes, a);
        add_rows<kColumns>(sum[h] + i * (kColumns / 2), part, upper, lower);
      }
    }
    release(ptx::shared_address(&s.empty[stage]), at);
  }

  // Operands of the next group of columns; of no use behind the last one.
  template <bool kSigned>
  static __device__ __forceinline__ void expand(
      const Ring& ring, const Place& at, uint32_t (&a)[16]) {
    uint32_t half = at.codes + ring.stage * (kBlocks * kBlockBytes);
    ptx::keep(half);
    decode<kSigned>(load_codes(half), a);
  }

  // Sums of a tile, once its first group of columns is there.
  template <int kWidth, bool kSigned>
  static __device__ __forceinline__ void add_groups(
      S& s, int num_groups, Ring& ring, Sums<kWidth>& sum, const Place& at) {
    constexpr bool kOneByOne = F::kWhole && (kBlocks == 1 || kWidth > 64);
    uint32_t a[kOneByOne ? 1 : 2][16];
    const uint32_t half = at.codes + ring.stage * (kBlocks * kBlockBytes);
    Codes codes = load_codes(half);
    decode<kSigned>(codes, a[0]);
    if constexpr (kOneByOne) {
#pragma unroll 1
      for (int left = num_groups; left; --left) {
        step_whole<kWidth, kSigned>(s, ring, at, sum, a[0], left > 1);
      }
    } else if constexpr (kBlocks == 2) {
      constexpr int kGroups = kByRow ? kGroupsAPassByRow : kGroupsAPass;
      Scales<kWidth> scales;
      scales.load(ring.stage, at);
      codes = load_codes(half + kHalfBytes);
      int left = num_groups;
      for (; left >= kGroups; left -= kGroups) {
        steps_halves<kWidth, kSigned, kGroups>(
            s, ring, at, sum, a[0], a[1], codes, scales, left > kGroups);
      }
      for (; left; --left) {
        steps_halves<kWidth, kSigned, 1>(s, ring, at, sum, a[0], a[1], codes, scales, left > 1);
      }
    } else if constexpr (Pieces<kWidth>::kNumber > 1) {
      int left = num_groups;
      for (; left >= kGroupsAPass; left -= kGroupsAPass) {
        steps<kWidth, kSigned, kGroupsAPass>(s, ring, at, sum, a, left > kGroupsAPass);
      }
      for (; left; --left) steps<kWidth, kSigned, 1>(s, ring, at, sum, a, left > 1);
    } else {
      float upper, lower;
      load_rows(ring.stage, at, 0, upper, lower);
      for (int g = 1; g <= num_groups; g += 2) {
        step_tokens<kWidth, kSigned>(
            s, ring, at, sum[0], a[0], a[1], upper, lower, g < num_groups);
        if (g == num_groups) break;
        step_tokens<kWidth, kSigned>(
            s, ring, at, sum[0], a[1], a[0], upper, lower, g + 1 < num_groups);
      }
    }
  }
};

}  // namespace w4a8
