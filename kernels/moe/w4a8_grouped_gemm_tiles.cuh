// What a W4A8 grouped GEMM is given, and how it is cut into tiles.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "../build/hopper_ptx.cuh"
#include "../build/hopper_tensor_map.cuh"

namespace w4a8 {

constexpr int kGroup = 128;         // columns that share a scale
constexpr int kHalfBytes = 4096;    // 64 rows x 128 columns of weights
constexpr int kCodeBytes = 8192;    // 128 rows x 128 columns of weights
constexpr int kShareBytes = 256;    // their scales, as shares of the rows' units, after them
constexpr int kUnitBytes = 256;     // and these, of which only a tile's last block is asked
constexpr int kBlockBytes = kCodeBytes + kShareBytes + kUnitBytes;
constexpr int kThreads = 3 * 128;   // two warpgroups compute, one copies
constexpr int kMaxExperts = 512;
constexpr int kNumBoxes = 6;  // tensor maps of 8, 16, 32, 64, 96, 128 rows
constexpr int kSpan = 8;      // groups of columns whose sum is taken before it is added to the rest
constexpr int kSpans = 2;     // whose scales are there at a time

struct Boxes {
  CUtensorMap map[kNumBoxes];
};

// The tensor map of so many rows.
__host__ __device__ constexpr int box_of(int rows) {
  return rows > 64 ? rows / 32 + 1 : rows > 32 ? 3 : rows / 16;
}

struct Problem {
  const uint8_t* weights;  // [E, N / 128, K / 128, kBlockBytes]
  const float* scales;     // of activations, with the strides below, in elements; a stride between
                           // groups of columns of 0 says that a row has one
  long long scale_stride_expert, scale_stride_row, scale_stride_group;
  const int* counts;  // [E] rows of each expert
  void* out;          // bfloat16; of what is gated e4m3, half as many columns
  float* out_scales;  // of e4m3, with the strides below and rows side by side; a stride between
                      // groups of columns of 0 says that one for all is there already
  long long out_scale_stride_expert, out_scale_stride_group;
  int num_experts;
  int capacity;  // rows reserved for an expert; 0: experts follow each other without gaps
  int num_rows;  // of activations and out, all experts together
  int n;
  int num_groups;  // K / 128
  bool early;      // weights and counts are there before the kernel in front ends
  bool leads;      // the next kernel may begin
  int slot;        // of the number of tiles that thread blocks have asked for
};

struct Tile {
  int expert, first_row, first_token, num_tokens, across;
  int width;       // num_tokens rounded up to a width that is compiled; 0: there is no tile
  bool only_once;  // no other tile reads these weights
};

// What tokens are scaled by in a span. In `carry` and `unit` the pair of tokens 8j + 2q and
// 8j + 2q + 1 is word [j / 4][q][j % 4], so that a lane's lie together, without conflicts of banks.
template <int kTokens>
struct TokenScales {
  alignas(128) uint4 shares[kTokens];  // of a token's groups, float16, at most 1: scales as shares
                                       // of `unit`
  uint32_t carry[kTokens / 2];  // float16: the unit of the span before, as a share of this one's
  uint32_t unit[kTokens / 2];   // bfloat16 powers of two
};

// kBlocks: weight blocks of a tile. With two, each warpgroup computes one, its halves in turn; with
// one, each warpgroup computes a half. kTokens: most tokens of a tile. kByRow: activations have one
// scale a row.
template <int kBlocks, int kTokens, bool kGated, bool kByRow>
struct Shared {
  static constexpr int kStages = kTokens == 64 ? 7 : 6;
  static constexpr int kPitch = kBlocks * 128 + 16;        // bytes between staged output rows
  static constexpr int kStaged = kTokens % 128 ? 64 : 32;  // output rows staged at a time
  alignas(1024) uint8_t activations[kStages][kTokens * kGroup];
  alignas(128) uint8_t weights[kStages][kBlocks * kBlockBytes];
  alignas(128) uint8_t staging[kGated ? 2 : 1][kGated ? kStaged * kPitch : 1];
  TokenScales<kTokens> scales[kByRow ? 1 : kSpans];
  alignas(16) float row_scales[kByRow ? 2 : 1][kByRow ? kTokens : 1];  // each warpgroup's own
  alignas(8) uint64_t full[kStages];
  uint64_t empty[kStages];
  uint64_t scales_full[kSpans], scales_empty[kSpans];
  uint64_t tile_full[2], tile_empty[2];
  Tile tile[2];  // this block's next one, and the one after it
  int first_row[kMaxExperts];
  int count[kMaxExperts];
  int first_tile[kMaxExperts + 1];
  uint8_t height[kMaxExperts];  // tokens of its tiles but the last
};

// Where each expert's rows and tiles begin; by one warp.
template <int kTokens, int kWider, typename S>
__device__ void plan(S& shared, const Problem& p, int tiles_across) {
  const int lane = threadIdx.x % 32;
  int rows_before = 0, tiles_before = 0;
  for (int base = 0; base < p.num_experts; base += 32) {
    const int e = base + lane;
    const int asked = e < p.num_experts ? max(p.counts[e], 0) : 0;
    const int count = p.capacity ? min(asked, p.capacity) : asked;
    const int down = (count + kTokens - 1) / kTokens;
    int rows = count, tiles = down * tiles_across;
    const int own_rows = rows, own_tiles = tiles;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int r = __shfl_up_sync(~0u, rows, distance), t = __shfl_up_sync(~0u, tiles, distance);
      if (lane >= distance) rows += r, tiles += t;
    }
    if (e < p.num_experts) {
      const int begin = p.capacity ? e * p.capacity : rows_before + rows - own_rows;
      shared.first_row[e] = begin;
      shared.count[e] = max(min(own_rows, p.num_rows - begin), 0);
      // An expert's tiles are as high as each other but for the last: 256 tokens make two of 128.
      const int rows_down = kWider * down;
      shared.height[e] = down ? (count + rows_down - 1) / rows_down * kWider : kTokens;
      shared.first_tile[e] = tiles_before + tiles - own_tiles;
    }
    rows_before += __shfl_sync(~0u, rows, 31);
    tiles_before += __shfl_sync(~0u, tiles, 31);
  }
  if (lane == 0) shared.first_tile[p.num_experts] = tiles_before;
}

template <int kLeast, int kWider, typename S>
__device__ __forceinline__ Tile locate(const S& shared, int tile, int& expert, int tiles_across) {
  while (tile >= shared.first_tile[expert + 1]) ++expert;
  const int local = tile - shared.first_tile[expert];
  Tile t;
  t.expert = expert;
  t.across = local % tiles_across;
  const int height = shared.height[expert];
  t.first_token = local / tiles_across * height;
  t.first_row = shared.first_row[expert] + t.first_token;
  const int count = shared.count[expert];
  t.num_tokens = max(min(height, count - t.first_token), 0);
  t.width = t.num_tokens > 64 ? (t.num_tokens + kWider - 1) / kWider * kWider
                              : 1 << (32 - __clz(max(t.num_tokens, kLeast) - 1));
  t.only_once = count <= height;
  return t;
}

// Activation scale of a tile's first token, for its first group of columns.
__device__ __forceinline__ const float* first_scale(const Problem& p, const Tile& t) {
  return p.scales + (p.capacity ? t.expert * p.scale_stride_expert +
                                      t.first_token * p.scale_stride_row
                                : t.first_row * p.scale_stride_row);
}

// A place in the ring of stages.
template <int kStages>
struct Places {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// A tile's sums of this thread: of each block half pairs of tokens, and what they are shares of.
template <int kBlocks, int kWidth, bool kByRow>
struct TileSums {
  uint32_t pair[kBlocks][kWidth / 4];       // float16; of two weight rows in turn
  uint32_t row[kBlocks];                    // units of these rows, bfloat16
  uint32_t token[kByRow ? 1 : kWidth / 8];  // units of the tokens, bfloat16
};

// The form of a kernel's tiles. kGated: a tile is a block of gate rows and the block of up rows
// that belongs to it, one for each warpgroup, and what leaves it is silu(gate) * up, quantised.
template <int kBlocks, int kTokens, bool kGated, bool kByRow>
struct Form {
  static_assert(!kGated || kBlocks == 2);
  static constexpr int kNumBlocks = kBlocks, kMostTokens = kTokens;
  static constexpr bool kGates = kGated, kHasRowScales = kByRow;
  using S = Shared<kBlocks, kTokens, kGated, kByRow>;
  using Ring = Places<S::kStages>;
  using Spans = Places<kSpans>;
  template <int kWidth>
  using Sums = TileSums<kBlocks, kWidth, kByRow>;
  static constexpr int kRows = kBlocks * 128;  // weight rows of a tile
  // Thread blocks ask for tiles one by one: those of many tokens take long, and not all as long.
  static constexpr bool kAsks = kTokens > 64;
  // Widths of tiles in tokens are the powers of two from kLeast to 64, then multiples of kWider.
  static constexpr int kLeast = kTokens == 64 ? 8 : 32;
  static constexpr int kWider = kTokens == 64 ? 64 : 32;
  // Warps that copy scales, in different quarters of the multiprocessor.
  static constexpr int kScaleWarps = kByRow ? 0 : kTokens == 64 ? 2 : 3;

  // What does not change from tile to tile: this thread, and where it reads in the first stage.
  struct Place {
    int warpgroup, thread, lane;
    uint32_t codes;   // its part of the first half that its warpgroup computes
    uint32_t rows;    // scale of its first row
    uint32_t tokens;  // scales of its tokens, or the first's carries
  };

  static __device__ __forceinline__ Place place(const S& s) {
    Place at;
    at.warpgroup = threadIdx.x / 128;
    at.thread = threadIdx.x % 128;
    at.lane = threadIdx.x % 32;
    const uint32_t weights = ptx::shared_address(s.weights);
    at.codes = weights + at.thread * 16;
    at.rows = weights + kCodeBytes + at.thread / 4 * 8;
    if constexpr (kBlocks == 2) {
      at.codes += at.warpgroup * kBlockBytes;
      at.rows += at.warpgroup * kBlockBytes;
    } else {
      at.codes += at.warpgroup * kHalfBytes;
      at.rows += at.warpgroup * 4;
    }
    if constexpr (kByRow) {
      at.tokens = ptx::shared_address(s.row_scales[at.warpgroup]) + at.lane % 4 * 8;
    } else {
      at.tokens = ptx::shared_address(s.scales[0].carry) + at.lane % 4 * 16;
    }
    // Kept in registers: without this they are computed anew at each use.
    ptx::keep(at.codes);
    ptx::keep(at.rows);
    ptx::keep(at.tokens);
    return at;
  }
};

}  // namespace w4a8
