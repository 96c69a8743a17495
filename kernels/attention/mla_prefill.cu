// MLA prefill with plain heads for Hopper: attention of blocks of new tokens over expanded keys.
//
//   out[t, h] = sum over s <= t of softmax_s(scale * query[t, h] . key[s, h]) * value[s, h]
//
// with key[s, h] = (both[s, h, :128], key_rope[s]) and value[s, h] = both[s, h, 128:]. A tile is
// one head of a block of up to 128 queries; a persistent grid draws tiles from a counter, those
// with most keys first. One thread copies queries, keys and values; two warpgroups of 64 queries
// each take turns at the matrix unit, so that the softmax of one runs under the products of the
// other.
//
// A step of a warpgroup issues the scores of the next 128 keys, then the values of the last 128,
// and turns those scores into weights while the values are added up. The first scores of a tile are
// computed with the last values of the tile before it: steps follow each other without a gap.

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "../build/hopper_bf16_pairs.cuh"
#include "../build/hopper_tensor_map.cuh"
#include "mla_prefill_ptx.cuh"

namespace {

using pairs::pack;
using pairs::turn_over;

constexpr int kNope = 128, kRope = 64, kValue = 128;
constexpr int kQueries = 64;              // of a warpgroup
constexpr int kKeys = 128;                // of a step
constexpr int kBox = 64;                  // columns of a box of a tensor map: 128 bytes
constexpr int kBoxesOfKey = (kNope + kRope) / kBox;
constexpr int kBoxesOfValue = kValue / kBox;
constexpr int kStages = 2;
constexpr int kThreads = 3 * 128;  // two warpgroups compute, one copies
constexpr int kBlockFields = 6;
// Each quarter of a multiprocessor has 512 registers a lane for its share of the warps.
constexpr int kCopyRegisters = 40;
constexpr int kComputeRegisters = 232;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
// As kernels.quantise has them.
constexpr float kLargestE4m3 = 448.0f, kSmallest = 1e-12f;

struct Maps {
  CUtensorMap query;     // [T, heads, 192], boxes of 64 x 1 x 64
  CUtensorMap both;      // [keys, heads, 256], boxes of 128 x 1 x 64
  CUtensorMap key_rope;  // [keys, 64], boxes of 128 x 64
};

struct Problem {
  const int* blocks;  // [num_blocks, kBlockFields], of kernels.mla_prefill_plan
  int num_blocks;
  int num_heads;
  int section_heads;  // whose keys and values stay in the L2 cache while their tiles are drawn
  int* drawn;         // [2] zeros, and zeros again: tiles beyond the first of each thread block,
                      // thread blocks that found none left
  __nv_bfloat16* out;
  float* lse;
  uint8_t* quantised;  // [T, heads, 128] e4m3, for what no later group adds to; null: `out`
  float* scales;       // of `quantised`, by head with this stride, then by token
  long long scale_stride;
  float scale;  // with log2(e)
};

// What a warpgroup has to know of a tile.
struct Tile {
  int token, head;
  int count;  // queries
  int seen;   // keys; 0: no further tile
  int shift;  // query i sees keys up to i + shift
  bool is_first, is_last;  // no earlier, no later group has keys for these queries
};

struct Shared {
  alignas(1024) uint8_t query[2][kBoxesOfKey][kQueries * 128];
  alignas(1024) uint8_t key[kStages][kBoxesOfKey][kKeys * 128];
  alignas(1024) uint8_t value[kStages][kBoxesOfValue][kKeys * 128];
  Tile tile[2];
  alignas(8) uint64_t query_full[2];
  uint64_t query_empty[2];
  uint64_t key_full[kStages], key_empty[kStages];
  uint64_t value_full[kStages], value_empty[kStages];
};

// A place in the ring of stages.
struct Ring {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

__device__ __forceinline__ float2 unpack(uint32_t pair) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
}

// Two pairs of BF16, times `factor`, to four bytes.
__device__ __forceinline__ uint32_t to_e4m3(uint32_t low, uint32_t high, float factor) {
  const float2 a = unpack(low), b = unpack(high);
  const __nv_fp8x4_e4m3 four(make_float4(a.x * factor, a.y * factor, b.x * factor, b.y * factor));
  return four.__x;
}

// ---- The copying thread ----

struct Source {
  int head, key;
};

__device__ __forceinline__ void copy_key(
    Shared& s, const Maps& maps, Ring& ring, const Source& from, int start) {
  const uint32_t full = ptx::shared_address(&s.key_full[ring.stage]);
  ptx::barrier_wait(ptx::shared_address(&s.key_empty[ring.stage]), ring.parity ^ 1);
  ptx::barrier_expect(full, sizeof(s.key[0]));
#pragma unroll
  for (int i = 0; i < kNope / kBox; ++i) {
    ptx::copy_box(ptx::shared_address(s.key[ring.stage][i]), &maps.both, i * kBox, from.head,
                  from.key + start, full);
  }
  ptx::copy_box(ptx::shared_address(s.key[ring.stage][kNope / kBox]), &maps.key_rope, 0,
                from.key + start, full);
  ring.advance();
}

__device__ __forceinline__ void copy_value(
    Shared& s, const Maps& maps, Ring& ring, const Source& from, int start) {
  const uint32_t full = ptx::shared_address(&s.value_full[ring.stage]);
  ptx::barrier_wait(ptx::shared_address(&s.value_empty[ring.stage]), ring.parity ^ 1);
  ptx::barrier_expect(full, sizeof(s.value[0]));
#pragma unroll
  for (int i = 0; i < kBoxesOfValue; ++i) {
    ptx::copy_box(ptx::shared_address(s.value[ring.stage][i]), &maps.both, kNope + i * kBox,
                  from.head, from.key + start, full);
  }
  ring.advance();
}

__device__ __forceinline__ void copy_query(
    Shared& s, const Maps& maps, const Tile& tile, uint32_t parity) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t full = ptx::shared_address(&s.query_full[i]);
    ptx::barrier_wait(ptx::shared_address(&s.query_empty[i]), parity ^ 1);
    s.tile[i] = tile;
    if (!tile.seen) {
      ptx::barrier_arrive(full);
      continue;
    }
    ptx::barrier_expect(full, sizeof(s.query[0]));
#pragma unroll
    for (int j = 0; j < kBoxesOfKey; ++j) {
      ptx::copy_box(ptx::shared_address(s.query[i][j]), &maps.query, j * kBox, tile.head,
                    tile.token + i * kQueries, full);
    }
  }
}

// To the L2 cache: a tile's queries are needed soon after their place in shared memory is free.
__device__ __forceinline__ void prefetch_query(const Maps& maps, const Tile& tile) {
  if (!tile.seen) return;
#pragma unroll
  for (int i = 0; i < 2 * kBoxesOfKey; ++i) {
    ptx::prefetch_box(&maps.query, i % kBoxesOfKey * kBox, tile.head,
                      tile.token + i / kBoxesOfKey * kQueries);
  }
}

// Tiles in the order of drawing: by sections of heads, in them by blocks.
__device__ __forceinline__ Tile locate(const Problem& p, int index, int& key) {
  Tile tile = {};
  if (index >= p.num_blocks * p.num_heads) return tile;
  const int first_head = index / (p.section_heads * p.num_blocks) * p.section_heads;
  const int heads = min(p.section_heads, p.num_heads - first_head);
  const int within = index - first_head * p.num_blocks;
  tile.head = first_head + within % heads;
  const int2* fields = reinterpret_cast<const int2*>(p.blocks + within / heads * kBlockFields);
  const int2 a = fields[0], b = fields[1], c = fields[2];
  tile.token = a.x, tile.count = a.y;
  key = b.x, tile.seen = b.y;
  tile.shift = c.x, tile.is_first = c.y;
  tile.is_last = tile.seen == tile.shift + tile.count;
  return tile;
}

__device__ void copy(Shared& s, const Maps& maps, const Problem& p) {
  Ring keys, values;
  uint32_t parity = 0;
  Source from = {}, before = {};
  int last = -1;  // where the last values of the tile before start
  Tile tile = locate(p, blockIdx.x, from.key);
  while (tile.seen) {
    const int next = gridDim.x + atomicAdd(p.drawn, 1);
    from.head = tile.head;
    copy_key(s, maps, keys, from, 0);
    if (last >= 0) copy_value(s, maps, values, before, last);
    copy_query(s, maps, tile, parity);
    parity ^= 1;
    before = from;
    const int seen = tile.seen;
    for (last = 0; last + kKeys < seen; last += kKeys) {
      copy_key(s, maps, keys, before, last + kKeys);
      copy_value(s, maps, values, before, last);
      if (!last) {
        tile = locate(p, next, from.key);
        prefetch_query(maps, tile);
      }
    }
    if (!last) tile = locate(p, next, from.key);
  }
  copy_value(s, maps, values, before, last);
  copy_query(s, maps, tile, parity);
  if (atomicAdd(p.drawn + 1, 1) == gridDim.x - 1) p.drawn[0] = 0, p.drawn[1] = 0;
}

// ---- The computing warpgroups ----

struct Place {
  int warpgroup, warp, lane;  // warp of the warpgroup
  int row;                    // the first of the two rows of this thread, 8 apart
  int column;                 // the first of its columns in each 8
  __device__ __forceinline__ bool leads() const { return lane == 0; }
};

// The softmax so far of this thread's two rows: the largest score without the scale, and the sum
// of this thread's columns.
struct State {
  float peak[2], weight[2];
};

__device__ __forceinline__ void issue_scores(float (&scores)[64], uint32_t query, uint32_t key) {
  const uint64_t a = ptx::operand(query), b = ptx::operand(key);
  constexpr int kSteps = kBox / 16;
#pragma unroll
  for (int i = 0; i < kBoxesOfKey * kSteps; ++i) {
    const int box = i / kSteps, within = i % kSteps * 2;  // 32 bytes
    ptx::multiply_shared(scores, a + (box * (kQueries * 128) >> 4) + within,
                         b + (box * (kKeys * 128) >> 4) + within, i > 0);
  }
  ptx::wgmma_commit();
}

__device__ __forceinline__ void issue_values(
    float (&sum)[64], const uint32_t (&weights)[32], uint32_t value, bool is_first) {
  const uint64_t b = ptx::transposed_operand(value, kKeys * 128);
#pragma unroll
  for (int i = 0; i < kKeys / 16; ++i) {
    ptx::multiply_registers(sum, weights + 4 * i, b + (i * 16 * 128 >> 4), i > 0 || !is_first);
  }
  ptx::wgmma_commit();
}

// Keys start .. start + 127: hides those that a row does not see.
__device__ __forceinline__ void hide(
    float (&scores)[64], const Tile& tile, int start, const Place& at) {
  const int line = at.warpgroup * kQueries + at.row;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int most = min(line + 8 * r + tile.shift, tile.seen - 1) - start - at.column;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (8 * i + j > most) scores[4 * i + 2 * r + j] = -INFINITY;
      }
    }
  }
}

// Of row `r`, with its new scores: the largest one, and what belongs to that. `below` is what
// scores are reduced by, `fading` what earlier sums are to be multiplied with.
__device__ __forceinline__ void raise(
    const float (&scores)[64], int r, float scale, State& state, float& below, float& fading) {
  float high[4];  // four chains, because a warp has its scheduler almost to itself
#pragma unroll
  for (int i = 0; i < 16; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float score = scores[4 * i + 2 * r + j];
      float& chain = high[i % 2 * 2 + j];
      chain = i < 2 ? score : fmaxf(chain, score);
    }
  }
  float peak = fmaxf(fmaxf(high[0], high[1]), fmaxf(high[2], high[3]));
  peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
  peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
  peak = fmaxf(peak, state.peak[r]);
  // A row that sees nothing must not compute inf - inf.
  below = peak == -INFINITY ? 0.0f : peak * scale;
  fading = ptx::exp2(state.peak[r] * scale - below);
  state.peak[r] = peak;
}

// Scores of row `r` to weights.
__device__ __forceinline__ void weigh(
    float (&scores)[64], int r, float scale, float below, float fading, State& state) {
  float sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float& score = scores[4 * i + 2 * r + j];
      score = ptx::exp2(score * scale - below);
      sum[j] += score;
    }
  }
  state.weight[r] = state.weight[r] * fading + (sum[0] + sum[1]);
}

__device__ __forceinline__ void round(const float (&scores)[64], uint32_t (&weights)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) weights[i] = pack(scores[2 * i], scores[2 * i + 1]);
}

// Zeros instead of values that belong to no key of the tile: a weight of zero does not hide what
// is not a number.
__device__ __forceinline__ void clear(uint8_t* value, int first_row, const Place& at) {
  for (int row = first_row + at.warp; row < kKeys; row += 4) {
#pragma unroll
    for (int i = 0; i < kBoxesOfValue; ++i) {
      reinterpret_cast<uint32_t*>(value + (i * kKeys + row) * 128)[at.lane] = 0;
    }
  }
  ptx::proxy_fence();
  ptx::barrier_sync<128>(3 + at.warpgroup);
}

// Two rows of 32 columns of this thread, in BF16. Each lane of four has a pair of columns in each
// eight, and is to write all of some eights.
__device__ __forceinline__ void store_plain(
    uint32_t (&pairs)[2][16], __nv_bfloat16* const (&to)[2], const bool (&is_line)[2], int lane) {
#pragma unroll
  for (int i = 0; i < 8; ++i) turn_over(pairs[i / 4] + i % 4 * 4, lane);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!is_line[r]) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t* const words = pairs[r] + 4 * i;
      *reinterpret_cast<uint4*>(to[r] + 32 * i + lane % 4 * 8) =
          make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// The same as E4M3, with one scale for a row, as kernels.quantise gives them for the BF16 values.
__device__ __forceinline__ void store_quantised(
    uint32_t (&pairs)[2][16], uint8_t* const (&to)[2], float* const (&scale)[2],
    const bool (&is_line)[2], int lane) {
  float largest[2] = {kSmallest, kSmallest};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 pair = unpack(pairs[r][i]);
      largest[r] = fmaxf(largest[r], fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 1));
    largest[r] = fmaxf(largest[r], __shfl_xor_sync(~0u, largest[r], 2));
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) turn_over(pairs[i / 4] + i % 4 * 4, lane);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!is_line[r]) continue;
    if (lane % 4 == 0) *scale[r] = largest[r] / kLargestE4m3;
    const float factor = kLargestE4m3 / largest[r];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t* const words = pairs[r] + 4 * i;
      *reinterpret_cast<uint2*>(to[r] + 32 * i + lane % 4 * 8) =
          make_uint2(to_e4m3(words[0], words[1], factor), to_e4m3(words[2], words[3], factor));
    }
  }
}

// Adds what earlier groups of keys gave: in base 2 that is one more key, with its log-sum as score.
__device__ __forceinline__ void merge(
    float (&sum)[64], int r, float& peak, float& weight, const __nv_bfloat16* out, float lse) {
  const float before = lse * kLog2E, higher = fmaxf(peak, before);
  const float fading = ptx::exp2(peak - higher), share = ptx::exp2(before - higher);
  weight = weight * fading + share;
  peak = higher;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float2 old = unpack(*reinterpret_cast<const uint32_t*>(out + 8 * i));
    float* const here = sum + 4 * i + 2 * r;
    here[0] = here[0] * fading + old.x * share;
    here[1] = here[1] * fading + old.y * share;
  }
}

// Sums to output.
__device__ __forceinline__ void store(
    float (&sum)[64], const State& state, const Tile& tile, const Problem& p, const Place& at) {
  float weight[2], peak[2];
  bool is_line[2];
  long long place[2];
  uint32_t pairs[2][16];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    weight[r] = state.weight[r];
    weight[r] += __shfl_xor_sync(~0u, weight[r], 1);
    weight[r] += __shfl_xor_sync(~0u, weight[r], 2);
    peak[r] = state.peak[r] * p.scale;
    const int line = at.warpgroup * kQueries + at.row + 8 * r;
    is_line[r] = line < tile.count;
    place[r] = static_cast<long long>(tile.token + line) * p.num_heads + tile.head;
  }
  if (!tile.is_first) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!is_line[r]) continue;
      const __nv_bfloat16* const out = p.out + place[r] * kValue + at.column;
      merge(sum, r, peak[r], weight[r], out, p.lse[place[r]]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float factor = ptx::reciprocal(weight[r]);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      pairs[r][i] = pack(sum[4 * i + 2 * r] * factor, sum[4 * i + 2 * r + 1] * factor);
    }
    if (is_line[r] && at.lane % 4 == 0) {
      p.lse[place[r]] = (peak[r] + ptx::log2(weight[r])) * kLn2;
    }
  }
  if (p.quantised && tile.is_last) {
    uint8_t* const to[2] = {p.quantised + place[0] * kValue, p.quantised + place[1] * kValue};
    float* const scale = p.scales + tile.head * p.scale_stride + tile.token +
                         at.warpgroup * kQueries + at.row;
    float* const scales[2] = {scale, scale + 8};
    store_quantised(pairs, to, scales, is_line, at.lane);
  } else {
    __nv_bfloat16* const to[2] = {p.out + place[0] * kValue, p.out + place[1] * kValue};
    store_plain(pairs, to, is_line, at.lane);
  }
}

struct Consumer {
  Shared& s;
  const Problem& p;
  Place at;
  Ring keys, values;
  uint32_t query_parity = 0;
  float scores[64], sum[64];
  uint32_t weights[32];
  State state;

  __device__ __forceinline__ Tile next_tile() {
    ptx::barrier_wait(ptx::shared_address(&s.query_full[at.warpgroup]), query_parity);
    query_parity ^= 1;
    return s.tile[at.warpgroup];
  }

  __device__ __forceinline__ void take_turn() const { ptx::barrier_sync<256>(1 + at.warpgroup); }
  __device__ __forceinline__ void pass_turn() const { ptx::barrier_pass<256>(2 - at.warpgroup); }

  __device__ __forceinline__ void wait_keys() const {
    ptx::barrier_wait(ptx::shared_address(&s.key_full[keys.stage]), keys.parity);
  }

  __device__ __forceinline__ void wait_values() const {
    ptx::barrier_wait(ptx::shared_address(&s.value_full[values.stage]), values.parity);
  }

  __device__ __forceinline__ void clear_behind(const Tile& tile, int start) const {
    if (start + kKeys > tile.seen) clear(s.value[values.stage][0], tile.seen - start, at);
  }

  __device__ __forceinline__ void start_scores() {
    ptx::wgmma_fence();
    issue_scores(scores, ptx::shared_address(s.query[at.warpgroup]),
                 ptx::shared_address(s.key[keys.stage]));
  }

  // Those of keys from `start`.
  template <int kPending>
  __device__ __forceinline__ void end_scores(const Tile& tile, int start) {
    const int most = min(at.warpgroup * kQueries + tile.shift, tile.seen - 1);
    const bool is_hidden = start + kKeys - 1 > most;
    const bool is_last = start + kKeys >= tile.seen;
    ptx::wgmma_wait<kPending>();
    ptx::pin(scores);
    ptx::barrier_arrive_if(ptx::shared_address(&s.query_empty[at.warpgroup]),
                           is_last && at.leads());
    if (is_hidden) hide(scores, tile, start, at);
  }

  // `when` is true; see `step`.
  __device__ __forceinline__ void release_keys(bool when) {
    ptx::barrier_arrive_if(ptx::shared_address(&s.key_empty[keys.stage]), at.leads() && when);
    keys.advance();
  }

  __device__ __forceinline__ void start_values(int start) {
    ptx::wgmma_fence();
    issue_values(sum, weights, ptx::shared_address(s.value[values.stage]), start == 0);
  }

  __device__ __forceinline__ void end_values() {
    ptx::wgmma_wait<0>();
    ptx::pin(sum);
    ptx::barrier_arrive_if(ptx::shared_address(&s.value_empty[values.stage]), at.leads());
    values.advance();
  }

  // The first scores of a tile, with nothing beside them.
  __device__ __forceinline__ void begin(const Tile& tile) {
    wait_keys();
    start_scores();
    end_scores<0>(tile, 0);
    release_keys(true);
    state = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float below, fading;
      raise(scores, r, p.scale, state, below, fading);
      weigh(scores, r, p.scale, below, fading, state);
    }
    round(scores, weights);
  }

  // The values of keys from `start` of a tile, beside the scores of the keys after them; or,
  // where there are none, beside the first ones of tile `next`.
  template <bool kIsLast>
  __device__ __forceinline__ void step(const Tile& tile, int start, const Tile& next) {
    wait_keys();
    wait_values();
    if (kIsLast) clear_behind(tile, start);
    take_turn();
    start_scores();
    start_values(start);
    pass_turn();
    const State before = state;
    if (kIsLast) state = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
    end_scores<1>(next, kIsLast ? 0 : start + kKeys);
    float below[2], fading[2];
    raise(scores, 0, p.scale, state, below[0], fading[0]);
    weigh(scores, 0, p.scale, below[0], fading[0], state);
    raise(scores, 1, p.scale, state, below[1], fading[1]);
    // NOTE: always so, but what needs all weights of a row keeps the assembler from waiting for the
    // values before they are computed.
    release_keys(!(state.weight[0] < 0.0f));
    end_values();
    if (kIsLast) {
      store(sum, before, tile, p, at);
    } else if (__any_sync(~0u, fading[0] != 1.0f || fading[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[i] *= fading[i / 2 % 2];
    }
    weigh(scores, 1, p.scale, below[1], fading[1], state);
    round(scores, weights);
  }

  __device__ __forceinline__ void run() {
    Tile tile = next_tile();
    if (!tile.seen) return;
    if (at.warpgroup == 1) pass_turn();  // the first turn is the other's
    begin(tile);
    for (;;) {
      int start = 0;
      for (; start + kKeys < tile.seen; start += kKeys) step<false>(tile, start, tile);
      const Tile next = next_tile();
      if (!next.seen) {
        wait_values();
        clear_behind(tile, start);
        start_values(start);
        end_values();
        store(sum, state, tile, p, at);
        return;
      }
      step<true>(tile, start, next);
      tile = next;
    }
  }
};

__global__ __launch_bounds__(kThreads, 1) void attend(
    const __grid_constant__ Maps maps, const __grid_constant__ Problem problem) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int thread = threadIdx.x % 128, warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      ptx::barrier_init(ptx::shared_address(&s.query_full[i]), 1);
      ptx::barrier_init(ptx::shared_address(&s.query_empty[i]), 4);  // warps of one warpgroup
    }
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(ptx::shared_address(&s.key_full[i]), 1);
      ptx::barrier_init(ptx::shared_address(&s.key_empty[i]), 8);  // warps of both
      ptx::barrier_init(ptx::shared_address(&s.value_full[i]), 1);
      ptx::barrier_init(ptx::shared_address(&s.value_empty[i]), 8);
    }
    ptx::barrier_init_fence();
  }
  __syncthreads();
  if (warpgroup == 2) {
    ptx::registers_give<kCopyRegisters>();
    if (thread == 0) copy(s, maps, problem);
  } else {
    ptx::registers_take<kComputeRegisters>();
    // Read from lane 0 so that the compiler knows it to be the same in a warp.
    const int warp = __shfl_sync(~0u, thread / 32, 0), lane = thread % 32;
    const Place at = {__shfl_sync(~0u, warpgroup, 0), warp, lane, warp * 16 + lane / 4,
                      lane % 4 * 2};
    Consumer{s, problem, at}.run();
  }
}

// A map of BF16; sizes from the innermost, strides in elements from the second.
template <int kRank>
bool make_map(
    tensor_map::Encode encode, CUtensorMap* map, const void* data,
    const long long (&sizes)[kRank], const long long (&strides)[kRank - 1],
    const int (&box)[kRank]) {
  cuuint64_t size[kRank], stride[kRank - 1];
  cuuint32_t boxes[kRank], steps[kRank];
  for (int i = 0; i < kRank; ++i) {
    size[i] = sizes[i], boxes[i] = box[i], steps[i] = 1;
    if (i) stride[i - 1] = strides[i - 1] * sizeof(__nv_bfloat16);
  }
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank, const_cast<void*>(data), size,
                stride, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

constexpr int kMaxDevices = 64;

cudaError_t launch(const Maps& maps, const Problem& p, cudaStream_t stream) {
  static int num_multiprocessors[kMaxDevices] = {};
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device >= kMaxDevices) return cudaErrorInvalidDevice;
  if (!num_multiprocessors[device]) {
    error = cudaFuncSetAttribute(attend, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 sizeof(Shared));
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&num_multiprocessors[device], cudaDevAttrMultiProcessorCount,
                                   device);
    if (error != cudaSuccess) return error;
  }
  const int num_tiles = p.num_blocks * p.num_heads;
  const int grid = num_tiles < num_multiprocessors[device] ? num_tiles
                                                           : num_multiprocessors[device];
  attend<<<grid, kThreads, sizeof(Shared), stream>>>(maps, p);
  return cudaGetLastError();
}

}  // namespace

extern "C" const char* mla_prefill_launch(
    const void* query, long long query_stride, long long head_stride, const void* both,
    const void* key_rope, long long rope_stride, const int* blocks, int* drawn, void* out,
    float* lse, void* quantised, float* scales, long long scale_stride, int num_tokens,
    int num_keys, int num_blocks, int num_heads, int section_heads, float scale, void* stream) {
  const Problem p = {blocks,
                     num_blocks,
                     num_heads,
                     section_heads,
                     drawn,
                     static_cast<__nv_bfloat16*>(out),
                     lse,
                     static_cast<uint8_t*>(quantised),
                     scales,
                     scale_stride,
                     scale * kLog2E};
  Maps maps;
  tensor_map::Encode encode;
  cudaError_t error = tensor_map::find_encode(&encode);
  if (error == cudaSuccess) {
    constexpr int kWide = kNope + kValue;
    const bool is_made =
        make_map<3>(encode, &maps.query, query, {kNope + kRope, num_heads, num_tokens},
                    {head_stride, query_stride}, {kBox, 1, kQueries}) &&
        make_map<3>(encode, &maps.both, both, {kWide, num_heads, num_keys},
                    {kWide, static_cast<long long>(kWide) * num_heads}, {kBox, 1, kKeys}) &&
        make_map<2>(encode, &maps.key_rope, key_rope, {kRope, num_keys}, {rope_stride},
                    {kBox, kKeys});
    error = is_made ? launch(maps, p, static_cast<cudaStream_t>(stream)) : cudaErrorInvalidValue;
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
