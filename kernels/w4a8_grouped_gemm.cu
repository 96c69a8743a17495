// W4A8 grouped GEMM for Hopper.
//
//   out[i, n] = sum over k of x[i, k] * x_scale[i, k / 128] * w[e][n, k] * w_scale[e][n, k / 128]
//
// with e the expert of row i. Weights are the A operand of wgmma, turned from four bits to e4m3
// in registers; tokens are its N, so that few tokens cost few columns. A persistent grid walks over
// tiles (expert, tokens, weight rows); one warp copies weights and activations by the bulk copy
// engine, one or three copy activation scales, two warpgroups compute.
//
// Weights come in blocks of 128 rows x 128 columns: 8192 bytes in the order in which the threads
// of two warpgroups hold the A operand, then 128 float scales, whose sign says which of two codes
// the weights have (w4a8_grouped_gemm_packing.py). In e4m3 the bytes 0..16 are the multiples of
// 2^-9, so a signed word becomes bytes by a mask, or a rotation and a mask, and sign and magnitude
// of zigzag codes by one multiply-add; the factor -2^-9 or 2^-8 is taken out of the scales when
// they are packed.

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "hopper_ptx.cuh"
#include "hopper_tensor_map.cuh"

namespace {

constexpr int kGroup = 128;         // columns that share a scale
constexpr int kHalfBytes = 4096;    // 64 rows x 128 columns of weights
constexpr int kBlockBytes = 8704;   // 128 rows x 128 columns of weights and their scales
constexpr int kScaleOffset = 8192;  // of the scales in a block
constexpr int kThreads = 3 * 128;   // two warpgroups compute, one copies
constexpr int kMaxExperts = 512;
// NOTE: matrix instructions in flight from one pass of a loop to the next would be waited for one
// by one; so a pass has several groups of columns.
constexpr int kGroupsAPass = 2;
constexpr float kLargest = 448.0f;  // of e4m3
constexpr float kSmallest = 1e-12f;  // a group of zeros still needs a scale
constexpr int kNumBoxes = 6;        // tensor maps with boxes of 8, 16, 32, 64, 128, 192 rows
constexpr int kMostTokens = 192;    // of a tile
// Each quarter of a multiprocessor has 512 registers a lane for its share of the warps.
constexpr int kCopyRegisters = 40;
constexpr int kComputeRegisters = 232;

// Cache policies of the bulk copy engine, as createpolicy makes them.
constexpr uint64_t kEvictFirst = 0x12F0000000000000;
constexpr uint64_t kEvictNormal = 0x1000000000000000;

struct Boxes {
  CUtensorMap map[kNumBoxes];
};

struct Problem {
  const uint8_t* weights;  // [E, N / 128, K / 128, kBlockBytes]
  const float* scales;     // of activations, with the strides below, in elements
  long long scale_stride_expert, scale_stride_row, scale_stride_group;
  const int* counts;  // [E] rows of each expert
  void* out;          // bfloat16; of what is gated e4m3, half as many columns
  float* out_scales;  // of e4m3, with the strides below and rows side by side
  long long out_scale_stride_expert, out_scale_stride_group;
  int num_experts;
  int capacity;  // rows reserved for an expert; 0: experts follow each other without gaps
  int num_rows;  // of activations and out, all experts together
  int n;
  int num_groups;  // K / 128
  bool early;      // weights and counts are there before the kernel in front ends
  bool leads;      // the kernel behind may begin
};

// kBlocks: weight blocks of a tile. With two, each warpgroup computes one, its halves in turn; with
// one, each warpgroup computes a half. kTokens: most tokens of a tile.
template <int kBlocks, int kTokens>
struct Shared {
  static constexpr int kStages = kTokens == kMostTokens ? 5 : 7;
  static constexpr int kColumns = kBlocks * 64;           // output columns of a warpgroup
  static constexpr int kPitch = kColumns * 2 + 16;        // bytes between staged output rows
  static constexpr int kStaged = 64;                      // output rows staged at a time
  static constexpr int kScalePitch = kTokens / 4 + 4;     // floats between scales of lane quads
  alignas(1024) uint8_t activations[kStages][kTokens * kGroup];
  alignas(128) uint8_t weights[kStages][kBlocks * kBlockBytes];
  alignas(128) uint8_t staging[2][kStaged * kPitch];
  // Scale of token 8j + 2q + i at [q][2j + i]: what a lane needs lies together.
  alignas(16) float scales[kStages][4 * kScalePitch];
  alignas(8) uint64_t full[kStages];
  uint64_t empty[kStages];
  int first_row[kMaxExperts];
  int count[kMaxExperts];
  int height[kMaxExperts];  // tokens of its tiles but the last
  int first_tile[kMaxExperts + 1];
};

// Where each expert's rows and tiles begin; by one warp.
template <int kTokens, typename S>
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
      shared.height[e] = down ? (count + 64 * down - 1) / (64 * down) * 64 : kTokens;
      shared.first_tile[e] = tiles_before + tiles - own_tiles;
    }
    rows_before += __shfl_sync(~0u, rows, 31);
    tiles_before += __shfl_sync(~0u, tiles, 31);
  }
  if (lane == 0) shared.first_tile[p.num_experts] = tiles_before;
}

struct Tile {
  int expert, first_row, first_token, num_tokens, across;
  int width;       // num_tokens rounded up to a width that is compiled
  int box;         // its tensor map
  bool only_once;  // no other tile reads these weights
};

template <int kTokens, int kLeast, typename S>
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
  t.box = 29 - __clz(max(t.num_tokens, kLeast) - 1);
  t.width = min(8 << t.box, kMostTokens);
  t.only_once = count <= height;
  return t;
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
  for (uint32_t& operand : a) ptx::keep(operand);  // in front of the fence that wgmma needs
}

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

// A piece is what one accumulator holds: 64 weight rows x kColumns tokens. Beside the sums of 192
// tokens registers have room for two accumulators of 64.
template <int kBlocks, int kWidth>
struct Pieces {
  static constexpr int kColumns = kWidth > 64 ? 64 : kWidth;
  static constexpr int kNumber = kBlocks * kWidth / kColumns;
  using Sums = float[kNumber][kColumns / 2];
};

// kGated: a tile is a block of gate rows and the block of up rows that belongs to it, one for each
// warpgroup, and what leaves it is silu(gate) * up, quantised.
template <int kBlocks, int kTokens, bool kGated>
struct Kernel {
  static_assert(!kGated || (kBlocks == 2 && kTokens <= 64));
  using S = Shared<kBlocks, kTokens>;
  using Ring = Places<S::kStages>;
  static constexpr int kRows = kBlocks * 128;  // weight rows of a tile
  static constexpr int kLeast = kBlocks == 2 ? 8 : 16;  // least width of a tile in tokens
  // Warps that copy scales, in different quarters of the multiprocessor.
  static constexpr int kScaleWarps = kTokens == kMostTokens ? 3 : 1;

  // What does not change from tile to tile: this thread, and where it reads in the first stage.
  struct Place {
    int warpgroup, thread, lane;
    uint32_t codes;   // its part of the first half that its warpgroup computes
    uint32_t rows;    // scale of its first row
    uint32_t tokens;  // scale of its first token
  };

  static __device__ __forceinline__ Place place(const S& s) {
    Place at;
    at.warpgroup = threadIdx.x / 128;
    at.thread = threadIdx.x % 128;
    at.lane = threadIdx.x % 32;
    const uint32_t weights = ptx::shared_address(s.weights);
    const int row = at.thread / 32 * 16 + at.lane / 4;
    at.codes = weights + at.thread * 16;
    at.rows = weights + kScaleOffset + row * 4;
    if constexpr (kBlocks == 2) {
      at.codes += at.warpgroup * kBlockBytes;
      at.rows += at.warpgroup * kBlockBytes;
    } else {
      at.codes += at.warpgroup * kHalfBytes;
      at.rows += at.warpgroup * 256;
    }
    at.tokens = ptx::shared_address(s.scales) + at.lane % 4 * S::kScalePitch * 4;
    // Kept in registers: without this they are computed anew at each use.
    ptx::keep(at.codes);
    ptx::keep(at.rows);
    ptx::keep(at.tokens);
    return at;
  }

  // Scales of this thread's rows in both blocks, and of its tokens.
  template <int kColumns>
  struct Scales {
    static constexpr int kVectors = kColumns < 16 ? 1 : kColumns / 16;
    float upper[2], lower[2];
    float4 token[kVectors];

    __device__ __forceinline__ void load(int stage, const Place& at) {
      load_rows(stage, at, 0, upper[0], lower[0]);
      load_rows(stage, at, 1, upper[1], lower[1]);
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

  // sum += part, scaled by row and token: eight tokens, two of them this lane's. With one block a
  // tile first by token: `part` is free for the next matrix instruction before the sums are there.
  static __device__ __forceinline__ void add_scaled(
      float* sum, const float* part, float upper, float lower, float left, float right) {
    if constexpr (kBlocks == 1) {
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
      S& s, Ring& ring, const Place& at, typename Pieces<1, kWidth>::Sums& sum,
      uint32_t (&a)[2][16], bool more) {
    constexpr int kColumns = Pieces<1, kWidth>::kColumns, kNumber = Pieces<1, kWidth>::kNumber;
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
        float* to = sum[i % kNumber] + 8 * j;
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

  // Operands of the next group of columns; of no use behind the last one.
  template <bool kSigned>
  static __device__ __forceinline__ void expand(
      const Ring& ring, const Place& at, uint32_t (&a)[16]) {
    uint32_t half = at.codes + ring.stage * (kBlocks * kBlockBytes);
    ptx::keep(half);
    decode<kSigned>(load_codes(half), a);
  }

  // One piece to the staged rows of its tokens, turned over: tokens become rows.
  template <int kColumns>
  static __device__ __forceinline__ void stage(
      uint8_t* staging, const float* sum, int first_token, int first_column, const Place& at) {
    const int row = first_token + at.lane % 8 + at.lane / 16 * 8;
    const int column = first_column + at.thread / 32 * 16 + at.lane / 8 % 2 * 8;
    const uint32_t to = ptx::shared_address(staging + row * S::kPitch + column * 2);
    if constexpr (kColumns == 8) {
      ptx::store_transposed_x2(to, pack(sum[0], sum[1]), pack(sum[2], sum[3]));
    } else {
#pragma unroll
      for (int j = 0; j < kColumns / 8; j += 2) {
        ptx::store_transposed_x4(
            to + j * 8 * S::kPitch, pack(sum[4 * j], sum[4 * j + 1]),
            pack(sum[4 * j + 2], sum[4 * j + 3]), pack(sum[4 * j + 4], sum[4 * j + 5]),
            pack(sum[4 * j + 6], sum[4 * j + 7]));
      }
    }
  }

  template <int kWidth>
  static __device__ __forceinline__ void store(
      S& s, const Problem& p, const Tile& t,
      typename Pieces<kBlocks, kWidth>::Sums& sum, int first_column, const Place& at) {
    constexpr int kColumns = Pieces<kBlocks, kWidth>::kColumns;
    constexpr int kRound = kWidth < S::kStaged ? kWidth : S::kStaged;  // tokens at a time
    constexpr int kPieces16 = S::kColumns / 8;  // 16-byte pieces in a row
    uint8_t* staging = s.staging[at.warpgroup];
#pragma unroll
    for (int first = 0; first < kWidth; first += kRound) {
      ptx::barrier_sync<128>(1 + at.warpgroup);  // the rows staged before are read
#pragma unroll
      for (int i = 0; i < Pieces<kBlocks, kWidth>::kNumber; ++i) {
        const int token = kBlocks == 2 ? 0 : i * kColumns;
        if (token < first || token >= first + kRound) continue;
        stage<kColumns>(staging, sum[i], token - first, kBlocks == 2 ? i * 64 : 0, at);
      }
      ptx::barrier_sync<128>(1 + at.warpgroup);
      const int column = at.thread % kPieces16 * 8;
      __nv_bfloat16* out = static_cast<__nv_bfloat16*>(p.out) +
                           static_cast<long long>(t.first_row + first) * p.n + first_column +
                           at.warpgroup * S::kColumns + column;
      const int rows = min(t.num_tokens - first, kRound);
      for (int row = at.thread / kPieces16; row < rows; row += 128 / kPieces16) {
        *reinterpret_cast<uint4*>(out + static_cast<long long>(row) * p.n) =
            *reinterpret_cast<const uint4*>(staging + row * S::kPitch + column * 2);
      }
    }
  }

  // What is gated is rounded to bfloat16 before, as it would be between two kernels.
  template <int kWidth>
  static __device__ __forceinline__ void store_gated(
      S& s, const Problem& p, const Tile& t, typename Pieces<kBlocks, kWidth>::Sums& sum,
      const Place& at) {
    constexpr int kLanes = kGroup / 8;  // of a token's group: 16 bytes of either half each
    ptx::barrier_sync<256>(1);          // the rows staged before are read
#pragma unroll
    for (int i = 0; i < 2; ++i) stage<kWidth>(s.staging[at.warpgroup], sum[i], 0, i * 64, at);
    ptx::barrier_sync<256>(1);
    const int column = threadIdx.x % kLanes * 8;
    const int half = p.n / 2, own = at.lane / kLanes;
    uint8_t* const out = static_cast<uint8_t*>(p.out) +
                         static_cast<long long>(t.first_row) * half + t.across * kGroup + column;
    float* const scales = p.out_scales + t.expert * p.out_scale_stride_expert +
                          t.across * p.out_scale_stride_group + t.first_token;
    // Tokens that are none are computed, too: without branches they overlap.
#pragma unroll
    for (int first = 0; first < kWidth; first += 16) {
      const int row = first + threadIdx.x / 32 * 2 + own;
      float values[8];
      const float peak = gated(s.staging[0] + row * S::kPitch + column * 2,
                               s.staging[1] + row * S::kPitch + column * 2, values);
      const float factor = __fdiv_rn(kLargest, peak);
      uint32_t words[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        words[i] = pack_e4m3(values[4 * i] * factor, values[4 * i + 1] * factor) |
                   pack_e4m3(values[4 * i + 2] * factor, values[4 * i + 3] * factor) << 16;
      }
      if (row >= t.num_tokens) continue;
      *reinterpret_cast<uint2*>(out + static_cast<long long>(row) * half) =
          make_uint2(words[0], words[1]);
      if (column == 0) scales[row] = __fdiv_rn(peak, kLargest);
    }
  }

  // silu(gate) * up of eight columns, and the largest of the 128 that 16 lanes have.
  static __device__ __forceinline__ float gated(
      const uint8_t* gate, const uint8_t* up, float (&values)[8]) {
    const uint4 gates = *reinterpret_cast<const uint4*>(gate);
    const uint4 ups = *reinterpret_cast<const uint4*>(up);
    const uint32_t gate_words[] = {gates.x, gates.y, gates.z, gates.w};
    const uint32_t up_words[] = {ups.x, ups.y, ups.z, ups.w};
    float peak = kSmallest;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float a = unpack(gate_words[i / 2], i % 2), b = unpack(up_words[i / 2], i % 2);
      values[i] = __fdividef(a, 1.0f + __expf(-a)) * b;
      peak = fmaxf(peak, fabsf(values[i]));
    }
#pragma unroll
    for (int distance = 8; distance; distance /= 2) {
      peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, distance));
    }
    return peak;
  }

  // Sums of a tile, once its first group of columns is there.
  template <int kWidth, bool kSigned>
  static __device__ __forceinline__ void add_groups(
      S& s, int num_groups, Ring& ring, typename Pieces<kBlocks, kWidth>::Sums& sum,
      const Place& at) {
    uint32_t a[2][16];
    const uint32_t half = at.codes + ring.stage * (kBlocks * kBlockBytes);
    Codes codes = load_codes(half);
    decode<kSigned>(codes, a[0]);
    if constexpr (kBlocks == 2) {
      Scales<kWidth> scales;
      scales.load(ring.stage, at);
      codes = load_codes(half + kHalfBytes);
      int left = num_groups;
      for (; left >= kGroupsAPass; left -= kGroupsAPass) {
        steps_halves<kWidth, kSigned, kGroupsAPass>(
            s, ring, at, sum, a[0], a[1], codes, scales, left > kGroupsAPass);
      }
      for (; left; --left) {
        steps_halves<kWidth, kSigned, 1>(s, ring, at, sum, a[0], a[1], codes, scales, left > 1);
      }
    } else if constexpr (Pieces<1, kWidth>::kNumber > 1) {
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

  template <int kWidth>
  static __device__ __forceinline__ void compute(
      S& s, const Problem& p, const Tile& t, Ring& ring, const Place& at) {
    typename Pieces<kBlocks, kWidth>::Sums sum;
#pragma unroll
    for (auto& piece : sum) {
#pragma unroll
      for (float& value : piece) value = 0.0f;
    }
    float upper, lower;
    wait_full(s, ring);
    load_rows(ring.stage, at, 0, upper, lower);
    // All rows of a warpgroup have one code.
    if (__any_sync(~0u, signbit(upper))) add_groups<kWidth, true>(s, p.num_groups, ring, sum, at);
    else add_groups<kWidth, false>(s, p.num_groups, ring, sum, at);
    if constexpr (kGated) store_gated<kWidth>(s, p, t, sum, at);
    else store<kWidth>(s, p, t, sum, t.across * kRows, at);
  }

  static __device__ __forceinline__ void copy(
      S& s, const Boxes& boxes, const Problem& p, const Tile& t, Ring& ring, bool& waits) {
    const long long block_row = static_cast<long long>(t.expert) * (p.n / 128) +
                                (kGated ? t.across : t.across * kBlocks);
    const long long row_bytes = static_cast<long long>(p.num_groups) * kBlockBytes;
    const long long block_stride = kGated ? p.n / 256 * row_bytes : row_bytes;
    const uint8_t* from = p.weights + block_row * row_bytes;
    const uint64_t policy = t.only_once ? kEvictFirst : kEvictNormal;
    const CUtensorMap* map = &boxes.map[t.box];
    const auto copy_weights = [&](int stage, int g) {
      const uint32_t full = ptx::shared_address(&s.full[stage]);
      ptx::barrier_expect(full, kBlocks * kBlockBytes + t.width * kGroup);
      const uint32_t weights = ptx::shared_address(s.weights[stage]);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        ptx::copy_bulk(weights + i * kBlockBytes, from + i * block_stride + g * kBlockBytes,
                       kBlockBytes, full, policy);
      }
    };
    // Of the first tile all stages' weights are on their way before activations are waited for.
    int ahead = 0;
    if (waits) {
#pragma unroll 1
      for (; ahead < S::kStages && ahead < p.num_groups; ++ahead) copy_weights(ahead, ahead);
      ptx::wait_for_predecessors();
      waits = false;
    }
#pragma unroll 1
    for (int g = 0; g < p.num_groups; ++g, ring.advance()) {
      const uint32_t full = ptx::shared_address(&s.full[ring.stage]);
      if (g >= ahead) {
        ptx::barrier_wait(ptx::shared_address(&s.empty[ring.stage]), ring.parity ^ 1);
        copy_weights(ring.stage, g);
      }
      ptx::copy_box(ptx::shared_address(s.activations[ring.stage]), map, g * kGroup, t.first_row,
                    full);
    }
  }

  static __device__ __forceinline__ void copy_scales(
      S& s, const Problem& p, const Tile& t, Ring& ring) {
    constexpr int kLanes = 32 * kScaleWarps, kRows = (kTokens + kLanes - 1) / kLanes;
    const int first = threadIdx.x - 9 * 32;
    const float* start =
        p.scales + (p.capacity ? t.expert * p.scale_stride_expert +
                                     t.first_token * p.scale_stride_row
                               : t.first_row * p.scale_stride_row);
    const float* from[kRows];  // of this lane's rows, kLanes apart
    bool valid[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first + i * kLanes;
      valid[i] = row < t.num_tokens;
      from[i] = start + (valid[i] ? row * p.scale_stride_row : 0);
    }
    const int place = first % 8 / 2 * S::kScalePitch + first / 8 * 2 + first % 2;
#pragma unroll 1
    for (int g = 0; g < p.num_groups; ++g, ring.advance()) {
      ptx::barrier_wait(ptx::shared_address(&s.empty[ring.stage]), ring.parity ^ 1);
      const uint32_t to = ptx::shared_address(s.scales[ring.stage]) + place * 4;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        // Rows that are 8 apart have places that are 2 floats apart.
        if (first + i * kLanes < t.width) ptx::copy_word(to + i * kLanes, from[i], valid[i]);
        from[i] += p.scale_stride_group;
      }
      ptx::copy_word_arrive(ptx::shared_address(&s.full[ring.stage]));
    }
  }

  // Calls `visit` for each tile of this thread block, in the same order in every warp.
  template <typename Visit>
  static __device__ __forceinline__ void walk(
      S& s, const Problem& p, int tiles_across, Visit visit) {
    const int num_tiles = s.first_tile[p.num_experts];
    Ring ring;
    int expert = 0;
    for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
      visit(locate<kTokens, kLeast>(s, tile, expert, tiles_across), ring);
    }
  }

  static __device__ __forceinline__ void run(const Boxes& boxes, const Problem& p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    S& s = *reinterpret_cast<S*>(memory);
    const int tiles_across = p.n / kRows;
    const int warp = threadIdx.x / 32;
    if (p.leads) ptx::launch_dependents();
    if (!p.early) ptx::wait_for_predecessors();
    if (warp == 0) plan<kTokens>(s, p, tiles_across);
    if (threadIdx.x == 32) {
      for (int i = 0; i < S::kStages; ++i) {
        // full: the copying thread, and each lane that copies scales
        ptx::barrier_init(ptx::shared_address(&s.full[i]), 1 + 32 * kScaleWarps);
        // empty: each computing warp
        ptx::barrier_init(ptx::shared_address(&s.empty[i]), 8);
      }
      ptx::barrier_init_fence();
    }
    __syncthreads();

    if (warp >= 8) {
      ptx::registers_give<kCopyRegisters>();
      bool waits = p.early && warp == 8;
      if (p.early && warp != 8) ptx::wait_for_predecessors();
      walk(s, p, tiles_across, [&](const Tile& t, Ring& ring) {
        if (warp == 8) {
          if (threadIdx.x % 32 == 0) copy(s, boxes, p, t, ring, waits);
        } else if (warp <= 8 + kScaleWarps) {
          copy_scales(s, p, t, ring);
        }
      });
      // Without a tile, too: what follows takes this kernel's end for that of all in front of it.
      if (waits) ptx::wait_for_predecessors();
    } else {
      ptx::registers_take<kComputeRegisters>();
      const Place at = place(s);
      if (kBlocks == 1 && at.warpgroup == 1) pass_turn(at);  // the first turn is the other's
      walk(s, p, tiles_across, [&](const Tile& t, Ring& ring) {
        if (t.width == kLeast) compute<kLeast>(s, p, t, ring, at);
        else if (t.width == 2 * kLeast) compute<2 * kLeast>(s, p, t, ring, at);
        else if (t.width == 4 * kLeast) compute<4 * kLeast>(s, p, t, ring, at);
        else if (kTokens != kMostTokens || t.width == 128) compute<8 * kLeast>(s, p, t, ring, at);
        else compute<kTokens>(s, p, t, ring, at);
      });
    }
  }
};

template <int kBlocks, int kTokens, bool kGated>
__global__ __launch_bounds__(kThreads, 1) void grouped_gemm(
    const __grid_constant__ Boxes boxes, const __grid_constant__ Problem problem) {
  Kernel<kBlocks, kTokens, kGated>::run(boxes, problem);
}

// Maps of activations [num_rows, 128 * num_groups].
cudaError_t make_boxes(Boxes* boxes, const void* activations, const Problem& p) {
  for (int i = 0; i < kNumBoxes; ++i) {
    const cudaError_t error = tensor_map::of_bytes(&boxes->map[i], activations, p.num_rows,
                                                   p.num_groups * kGroup, min(8 << i, kMostTokens));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

constexpr int kMaxDevices = 64;

template <int kBlocks, int kTokens, bool kGated>
cudaError_t launch(const Boxes& boxes, const Problem& p, cudaStream_t stream) {
  constexpr int bytes = sizeof(typename Kernel<kBlocks, kTokens, kGated>::S);
  static int num_multiprocessors[kMaxDevices] = {};
  auto* const kernel = grouped_gemm<kBlocks, kTokens, kGated>;
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device >= kMaxDevices) return cudaErrorInvalidDevice;

  if (!num_multiprocessors[device]) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&num_multiprocessors[device], cudaDevAttrMultiProcessorCount,
                                   device);
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(num_multiprocessors[device]);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = p.early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, boxes, p);
}

}  // namespace

// Tiles that a caller may choose among; see w4a8_grouped_gemm_cuda.py.
extern "C" const char* w4a8_grouped_gemm_launch(
    int variant, const void* activations, const float* scales, long long scale_stride_expert,
    long long scale_stride_row, long long scale_stride_group, const void* weights,
    const int* counts, void* out, float* out_scales, long long out_scale_stride_expert,
    long long out_scale_stride_group, int num_experts, int capacity, int num_rows, int n, int k,
    int early, int leads, void* stream) {
  const Problem p = {static_cast<const uint8_t*>(weights),
                     scales,
                     scale_stride_expert,
                     scale_stride_row,
                     scale_stride_group,
                     counts,
                     out,
                     out_scales,
                     out_scale_stride_expert,
                     out_scale_stride_group,
                     num_experts,
                     capacity,
                     num_rows,
                     n,
                     k / kGroup,
                     early != 0,
                     leads != 0};
  Boxes boxes;
  cudaError_t error = num_experts <= kMaxExperts ? make_boxes(&boxes, activations, p)
                                                 : cudaErrorInvalidValue;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (error == cudaSuccess) {
    switch (variant) {
      case 0: error = launch<2, 64, false>(boxes, p, on); break;
      case 1: error = launch<1, kMostTokens, false>(boxes, p, on); break;
      case 2: error = launch<2, 64, true>(boxes, p, on); break;
      default: error = cudaErrorInvalidValue;
    }
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
