// Absorbed MLA over paged latents for Hopper: parts of rows, 64 lines a thread block.
//
//   out[line] = sum over tokens t of softmax_t(scale * query[line] . latent[t]) * latent[t, :512]
//
// The tiles of 64 tokens of all rows are one list, of which each cluster takes an equal stretch;
// the thread blocks of a cluster have 64 lines each and copy each tile once for both. Two tiles
// have room. Of every two, one warpgroup computes the scores and weights of the first, the other
// those of the second, and each sums one half of the values of both: the weights of one tile are
// computed under products of the other.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "../build/hopper_bf16_pairs.cuh"
#include "../build/hopper_tensor_map.cuh"
#include "../build/hopper_wgmma_shared.cuh"
#include "mla_decode_ptx.cuh"
#include "mla_prefill_ptx.cuh"

namespace {

using pairs::pack;
using pairs::turn_over;

constexpr int kLines = 64, kTokens = 64;
constexpr int kWidth = 576, kValue = 512;
constexpr int kBox = 64;  // columns of a piece of a tile: 128 bytes
constexpr int kPieces = kWidth / kBox;
constexpr int kHalf = kValue / kBox / 2;  // pieces that a warpgroup sums
constexpr int kRope = kPieces - 1;        // the piece that is no value
constexpr int kPieceBytes = kTokens * 128;
constexpr int kThreads = 3 * 128;  // two warpgroups compute, two warps of the third copy
constexpr int kCopyRegisters = 40;
constexpr int kComputeRegisters = 232;
// Of base 2: how far scores may rise above what they are reduced by before sums are scaled.
constexpr float kSlack = 8.0f;
constexpr float kLog2E = 1.4426950408889634f;

struct Maps {
  CUtensorMap query;   // [9, lines, 64], boxes of 9 x 64 x 64
  CUtensorMap values;  // [9, tokens, 64], boxes of kHalf / cluster x 64 x 64
  CUtensorMap rope;    // [9, tokens, 64], boxes of 1 x 64 x 64
};

struct Problem {
  const __nv_bfloat16* cache;
  const int* block_table;
  const int* kv_lengths;
  __nv_bfloat16* out;
  float* out_lse;
  int num_rows, num_queries, num_heads, table_stride, num_parts, min_tiles;
  float scale;  // with log2(e)
};

// What is done of a row at a time.
struct Piece {
  int row;
  int position;  // of its first token
  int count;     // tiles; 0: no further piece
  int length;    // of the row
};

struct Shared {
  alignas(1024) uint8_t query[kPieces][kPieceBytes];
  // The piece that is no value becomes, once it has been multiplied, the tile's weights.
  alignas(1024) uint8_t tile[2][kPieces][kPieceBytes];
  float peak[2][kLines];
  float weight[2][2][kLines];
  alignas(4) bool fades[2][4];  // by warpgroup, of each warp
  Piece piece;
  alignas(8) uint64_t query_full;
  uint64_t query_empty;
  uint64_t full[2][2], empty[2][2];  // by tile and half
};

constexpr int kWeightsReady = 1, kWeightReady = 3, kScoresIssued = 4;  // named barriers

// The half of a tile that its rope piece goes with: who sums that is the last to read it.
__host__ __device__ constexpr int rope_half(int slot) { return 1 - slot; }

// ---- The copying warps ----

// One for each place of a tile.
template <int kSlot, int kCluster>
struct Producer {
  Shared& s;
  const Maps& maps;
  const Problem& p;
  int rank, lane;
  uint32_t parity = 1, query_parity = 1;

  __device__ __forceinline__ void load_half(int half, int page) {
    const uint32_t full = ptx::shared_address(&s.full[kSlot][half]);
    ptx::barrier_wait(ptx::shared_address(&s.empty[kSlot][half]), parity);
    const bool has_rope = half == rope_half(kSlot);
    ptx::barrier_expect(full, (kHalf + has_rope) * kPieceBytes);
    // Each thread block of the cluster copies a share for all of them.
    constexpr int kShare = kHalf / kCluster;
    constexpr uint16_t kAll = (1 << kCluster) - 1;
    const int piece = half * kHalf + rank * kShare;
    const uint32_t to = ptx::shared_address(s.tile[kSlot][piece]);
    const uint32_t rope = ptx::shared_address(s.tile[kSlot][kRope]);
    const bool is_mine = has_rope && rank == kSlot % kCluster;
    if constexpr (kCluster == 1) {
      ptx::copy_box(to, &maps.values, 0, page * kTokens, piece, full);
      if (is_mine) ptx::copy_box(rope, &maps.rope, 0, page * kTokens, kRope, full);
    } else {
      ptx::copy_box_multicast(to, &maps.values, 0, page * kTokens, piece, full, kAll);
      if (is_mine) ptx::copy_box_multicast(rope, &maps.rope, 0, page * kTokens, kRope, full, kAll);
    }
  }

  __device__ __forceinline__ void load_tile(int page) {
    if (lane == 0) {
      load_half(kSlot, page);
      load_half(1 - kSlot, page);
    }
    __syncwarp();
    parity ^= 1;
  }

  __device__ __forceinline__ void load_query(const Piece& piece, int first_line, int num_lines) {
    if (lane == 0) {
      const uint32_t full = ptx::shared_address(&s.query_full);
      ptx::barrier_wait(ptx::shared_address(&s.query_empty), query_parity);
      s.piece = piece;
      if (!piece.count) {
        ptx::barrier_arrive(full);
      } else {
        ptx::barrier_expect(full, sizeof(s.query));
        ptx::copy_box(ptx::shared_address(s.query), &maps.query, 0,
                      piece.row * num_lines + first_line, 0, full);
      }
    }
    __syncwarp();
    query_parity ^= 1;
  }

  // To the L2 cache, by all lanes: the copy engine would do it before the next copies.
  __device__ __forceinline__ void fetch_ahead(int page) const {
    constexpr int kBytes = kTokens * kWidth * sizeof(__nv_bfloat16), kLine = 128;
    const uint8_t* const from = reinterpret_cast<const uint8_t*>(p.cache) +
                                static_cast<long long>(page) * kBytes + rank * (kBytes / kCluster);
#pragma unroll
    for (int i = 0; i < kBytes / kCluster / kLine / 32; ++i) {
      ptx::prefetch_line(from + (i * 32 + lane) * kLine);
    }
  }

  __device__ __forceinline__ int tiles_of(int row) const {
    return row < p.num_rows ? (p.kv_lengths[row] + kTokens - 1) / kTokens : 0;
  }

  // Tiles of a part but the last.
  __device__ __forceinline__ int tiles_of_parts(int& total) const {
    total = 0;
    for (int first = 0; first < p.num_rows; first += 32) total += tiles_of(first + lane);
    total = __reduce_add_sync(~0u, total);
    return max((total + p.num_parts - 1) / p.num_parts, p.min_tiles);
  }

  // The row that a tile belongs to, and the tiles before that row.
  __device__ __forceinline__ void find_row(int tile, int& row, int& begin) const {
    for (row = 0, begin = 0;; row += 32) {
      const int count = tiles_of(row + lane);
      int end = count;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int below = __shfl_up_sync(~0u, end, distance);
        if (lane >= distance) end += below;
      }
      const uint32_t after = __ballot_sync(~0u, begin + end > tile);
      if (after) {
        const int found = __ffs(after) - 1;
        begin += __shfl_sync(~0u, end - count, found);
        row += found;
        return;
      }
      begin += __shfl_sync(~0u, end, 31);
    }
  }

  __device__ __forceinline__ void run(int first_line) {
    const int num_lines = p.num_queries * p.num_heads;
    int total, row, begin;
    const int per_part = tiles_of_parts(total);
    int tile = blockIdx.y * per_part;
    const int stop = min(tile + per_part, total);
    const bool is_used = tile < stop;
    if (is_used) find_row(tile, row, begin);
    bool has_waited = false;
    for (; tile < stop; ++row) {
      const int length = p.kv_lengths[row], row_end = begin + (length + kTokens - 1) / kTokens;
      const int next = min(stop, row_end), first = tile - begin, count = next - tile;
      if (count > 0) {
        const Piece piece = {row, first * kTokens, count, length};
        const int* const table =
            p.block_table + static_cast<long long>(row) * p.table_stride + first + kSlot;
        const int mine = (count - kSlot + 1) / 2;
        int pages = 0;
        const auto page_of = [&](int i) {
          if (i % 32 == 0) pages = i + lane < mine ? table[2 * (i + lane)] : 0;
          return __shfl_sync(~0u, pages, i % 32);
        };
        int page = page_of(0), i = 0;
        if (!has_waited) {
          // Tiles without new tokens were there before the kernels in front began.
          const int old = (length - p.num_queries) / kTokens - first;
          if (mine && kSlot < old) load_tile(page), i = 1;
          ptx::wait_for_predecessors();
          has_waited = true;
        }
        if (kSlot == 0) load_query(piece, first_line, num_lines);
        if (mine && !i) load_tile(page);
        for (i = 1; i < mine; ++i) {
          page = page_of(i);
          fetch_ahead(page);
          load_tile(page);
        }
      }
      tile = max(tile, next);
      begin = row_end;
    }
    if (!has_waited) ptx::wait_for_predecessors();
    if (kSlot == 0) load_query(Piece{}, first_line, num_lines);
  }
};

// ---- The computing warpgroups ----

struct Place {
  int warp, lane;  // warp of the warpgroup
  int line;        // the first of the two lines of this thread, 8 apart
  int column;      // the first of its columns in each 8
};

template <int kGroup, int kCluster>
struct Consumer {
  Shared& s;
  const Problem& p;
  Place at;
  uint32_t parity[2] = {0, 0};
  uint32_t query_parity = 0;
  float scores[32], sum[128];
  uint32_t weights[16];
  float peak[2], weight[2], fading[2];

  __device__ __forceinline__ void wait_half(int slot, int half) const {
    ptx::barrier_wait(ptx::shared_address(&s.full[slot][half]), parity[slot]);
  }

  __device__ __forceinline__ void release(int slot, int half) const {
    if (at.lane < kCluster) {
      const uint32_t barrier = ptx::shared_address(&s.empty[slot][half]);
      if constexpr (kCluster == 1) {
        ptx::barrier_arrive(barrier);
      } else {
        ptx::barrier_arrive_remote(ptx::address_in(at.lane, barrier));
      }
    }
  }

  __device__ __forceinline__ void release_query() const {
    if (at.lane == 0) ptx::barrier_arrive(ptx::shared_address(&s.query_empty));
  }

  template <int kFirst, int kCount>
  __device__ __forceinline__ void issue_pieces(bool is_first) {
    const uint64_t a = ptx::operand(ptx::shared_address(s.query[kFirst]));
    const uint64_t b = ptx::operand(ptx::shared_address(s.tile[kGroup][kFirst]));
#pragma unroll
    for (int i = 0; i < kCount * 4; ++i) {
      const int offset = (i / 4 * kPieceBytes >> 4) + i % 4 * 2;  // 32 bytes
      ptx::WgmmaShared<ptx::Bf16, 64>::issue(scores, a + offset, b + offset, i > 0 || !is_first);
    }
  }

  // Of this warpgroup's tile: the half that is there first, the other one, the rope piece.
  __device__ __forceinline__ void start_scores() {
    wait_half(kGroup, kGroup);
    ptx::wgmma_fence();
    issue_pieces<kGroup * kHalf, kHalf>(true);
    wait_half(kGroup, 1 - kGroup);
    issue_pieces<(1 - kGroup) * kHalf, kHalf>(false);
    issue_pieces<kRope, 1>(false);
    ptx::wgmma_commit();
  }

  // Hides columns from `most` on.
  __device__ __forceinline__ void hide(int most) {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      if (i / 4 * 8 + i % 2 + at.column >= most) scores[i] = -INFINITY;
    }
  }

  // What scores of line `r` are reduced by becomes `higher`.
  __device__ __forceinline__ void raise(int r, float higher) {
    fading[r] = higher == peak[r] ? 1.0f : ptx::exp2(peak[r] - higher);
    peak[r] = higher;
    weight[r] *= fading[r];
  }

  // Scores to weights.
  __device__ __forceinline__ void soften() {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float high[2];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float score = scores[4 * i + 2 * r + j];
          high[j] = i ? fmaxf(high[j], score) : score;
        }
      }
      float highest = fmaxf(high[0], high[1]);
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2)) * p.scale;
      raise(r, highest > peak[r] + kSlack ? highest : peak[r]);
      // A line that sees nothing must not compute inf - inf.
      const float below = peak[r] == -INFINITY ? 0.0f : peak[r];
      float total[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& score = scores[4 * i + 2 * r + j];
          score = ptx::exp2(score * p.scale - below);
          total[j] += score;
        }
      }
      weight[r] += total[0] + total[1];
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) weights[i] = pack(scores[2 * i], scores[2 * i + 1]);
  }

  __device__ __forceinline__ bool is_fading() const {
    return __any_sync(~0u, fading[0] != 1.0f || fading[1] != 1.0f);
  }

  // Weights and peaks to the other warpgroup.
  __device__ __forceinline__ void publish() {
    const int row = at.warp * 16 + at.lane % 16;
    const uint32_t to = ptx::shared_address(s.tile[kGroup][kRope]) + row * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int chunk = 2 * i + at.lane / 16;
      const uint32_t* const w = weights + 4 * i;
      ptx::store_matrices(to + ((chunk ^ (row % 8)) << 4), w[0], w[1], w[2], w[3]);
    }
    if (at.lane % 4 == 0) {
      s.peak[kGroup][at.line] = peak[0];
      s.peak[kGroup][at.line + 8] = peak[1];
    }
    const bool fades = is_fading();
    if (at.lane == 0) s.fades[kGroup][at.warp] = fades;
    ptx::proxy_fence();
    ptx::barrier_pass<256>(kWeightsReady + kGroup);
  }

  // Whether any peak of the warpgroup's lines rose.
  __device__ __forceinline__ bool take_peaks() {
    ptx::barrier_sync<256>(kWeightsReady + 1 - kGroup);
    raise(0, s.peak[1 - kGroup][at.line]);
    raise(1, s.peak[1 - kGroup][at.line + 8]);
    return *reinterpret_cast<const uint32_t*>(s.fades[1 - kGroup]);
  }

  // All products have ended: sums so far, by what `raise` found.
  __device__ __forceinline__ void fade() {
    ptx::wgmma_wait<0>();
    ptx::pin(sum);
#pragma unroll
    for (int i = 0; i < 128; ++i) sum[i] *= fading[i / 2 % 2];
  }

  __device__ __forceinline__ uint64_t values(int slot) const {
    return ptx::transposed_operand(ptx::shared_address(s.tile[slot][kGroup * kHalf]), kPieceBytes);
  }

  __device__ __forceinline__ void start_own_values(bool is_first) {
    const uint64_t b = values(kGroup);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) {
      ptx::values_registers(sum, weights + 4 * i, b + (i * 16 * 128 >> 4), i > 0 || !is_first);
    }
    ptx::wgmma_commit();
  }

  __device__ __forceinline__ void start_other_values(bool is_first) {
    const uint64_t a = ptx::operand(ptx::shared_address(s.tile[1 - kGroup][kRope]));
    const uint64_t b = values(1 - kGroup);
    wait_half(1 - kGroup, kGroup);
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < kTokens / 16; ++i) {
      ptx::values_shared(sum, a + i * 2, b + (i * 16 * 128 >> 4), i > 0 || !is_first);
    }
    ptx::wgmma_commit();
  }

  template <int kPending>
  __device__ __forceinline__ void wait_scores() {
    ptx::wgmma_wait<kPending>();
    ptx::pin(scores);
  }

  // Two tiles of a piece, or its last one, from tile `i`; of whose columns `most` are seen.
  template <bool kIsPair>
  __device__ __forceinline__ void step_first(int i, int count, int most) {
    start_scores();
    if (kIsPair) ptx::barrier_pass<256>(kScoresIssued);
    wait_scores<0>();
    if (i + 2 >= count) release_query();
    if (most < kTokens) hide(most);
    soften();
    if (i && is_fading()) fade();
    start_own_values(i == 0);
    publish();
    // Its place is needed for the tile after the next, more than the matrix unit the next product.
    ptx::wgmma_wait<0>();
    ptx::pin(sum);
    release(0, 0);
    if (kIsPair) {
      if (take_peaks()) fade();
      start_other_values(false);
      ptx::wgmma_wait<0>();
      ptx::pin(sum);
      release(1, 0);
    }
  }

  template <bool kIsPair>
  __device__ __forceinline__ void step_second(int i, int count, int most) {
    // After those of the first tile, whose weights are then computed under these.
    if (kIsPair) {
      ptx::barrier_sync<256>(kScoresIssued);
      start_scores();
    }
    if (take_peaks() && i) fade();
    start_other_values(i == 0);
    if (!kIsPair) {
      ptx::wgmma_wait<0>();
      ptx::pin(sum);
      release(0, 1);
      return;
    }
    wait_scores<1>();
    if (i + 3 >= count) release_query();
    if (most < 2 * kTokens) hide(most - kTokens);
    soften();
    if (is_fading()) fade();
    start_own_values(false);
    publish();
    ptx::wgmma_wait<1>();
    release(0, 1);
    ptx::wgmma_wait<0>();
    ptx::pin(sum);
    release(1, 1);
  }

  template <bool kIsPair>
  __device__ __forceinline__ void step(int i, int count, int most) {
    if (kGroup == 0) {
      step_first<kIsPair>(i, count, most);
    } else {
      step_second<kIsPair>(i, count, most);
    }
    parity[0] ^= 1;
    parity[1] ^= kIsPair;
  }

  __device__ __forceinline__ void store(const Piece& piece, int first_line, int turn) {
    const int num_lines = p.num_queries * p.num_heads;
    float total[2], factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      weight[r] += __shfl_xor_sync(~0u, weight[r], 1);
      weight[r] += __shfl_xor_sync(~0u, weight[r], 2);
      if (at.lane % 4 == 0) s.weight[turn][kGroup][at.line + 8 * r] = weight[r];
    }
    ptx::barrier_sync<256>(kWeightReady);
    const long long place =
        static_cast<long long>(piece.row + blockIdx.y) * num_lines + first_line + at.line;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      total[r] = s.weight[turn][0][at.line + 8 * r] + s.weight[turn][1][at.line + 8 * r];
      factor[r] = total[r] == 0.0f ? 0.0f : ptx::reciprocal(total[r]);
      if (kGroup == 0 && at.lane % 4 == 0) {
        p.out_lse[place + 8 * r] =
            total[r] == 0.0f ? -INFINITY : peak[r] + ptx::log2(total[r]);
      }
    }
    __nv_bfloat16* const to = p.out + place * kValue + kGroup * (kValue / 2) + at.lane % 4 * 8;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float* const here = sum + 4 * (4 * i + j) + 2 * r;
          words[j] = pack(here[0] * factor[r], here[1] * factor[r]);
        }
        turn_over(words, at.lane);
        *reinterpret_cast<uint4*>(to + 8 * r * kValue + 32 * i) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }

  __device__ __forceinline__ void run(int first_line) {
    for (int turn = 0;; turn ^= 1) {
      ptx::barrier_wait(ptx::shared_address(&s.query_full), query_parity);
      query_parity ^= 1;
      const Piece piece = s.piece;
      if (!piece.count) return;
      // The last query of a row sees all its tokens, the one before all but one, and so on.
      const int query = first_line / p.num_heads;
      const int seen = piece.length - p.num_queries + query + 1 - piece.position;
      peak[0] = peak[1] = -INFINITY;
      weight[0] = weight[1] = 0.0f;
      if (kGroup == 1 && piece.count == 1) release_query();
      int i = 0;
      for (; i + 1 < piece.count; i += 2) step<true>(i, piece.count, seen - i * kTokens);
      if (i < piece.count) step<false>(i, piece.count, seen - i * kTokens);
      store(piece, first_line, turn);
    }
  }
};

template <int kCluster>
__global__ __launch_bounds__(kThreads, 1) void attend(
    const __grid_constant__ Maps maps, const __grid_constant__ Problem problem) {
  extern __shared__ __align__(1024) uint8_t memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  // Read from lane 0 so that the compiler knows it to be the same in a warp.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int first_line = blockIdx.x * kLines;
  ptx::launch_dependents();
  if (threadIdx.x == 0) {
    ptx::barrier_init(ptx::shared_address(&s.query_full), 1);
    ptx::barrier_init(ptx::shared_address(&s.query_empty), 8);  // warps of both warpgroups
    for (int i = 0; i < 4; ++i) {
      ptx::barrier_init(ptx::shared_address(&s.full[i / 2][i % 2]), 1);
      // Warps of a warpgroup of each thread block.
      ptx::barrier_init(ptx::shared_address(&s.empty[i / 2][i % 2]), 4 * kCluster);
    }
    ptx::barrier_init_fence();
  }
  if constexpr (kCluster > 1) {
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  }
  __syncthreads();
  if (warp >= 8) {
    ptx::registers_give<kCopyRegisters>();
    const int rank = kCluster > 1 ? ptx::cluster_rank() : 0;
    if (warp == 8) Producer<0, kCluster>{s, maps, problem, rank, lane}.run(first_line);
    if (warp == 9) Producer<1, kCluster>{s, maps, problem, rank, lane}.run(first_line);
  } else {
    ptx::registers_take<kComputeRegisters>();
    const Place at = {warp % 4, lane, warp % 4 * 16 + lane / 4, lane % 4 * 2};
    if (warp < 4) {
      Consumer<0, kCluster>{s, problem, at}.run(first_line);
    } else {
      Consumer<1, kCluster>{s, problem, at}.run(first_line);
    }
  }
  if constexpr (kCluster > 1) {
    // The other one's tiles may still be on their way here, and its warps arrive at barriers.
    ptx::cluster_arrive();
    ptx::cluster_wait();
  }
}

// A map of BF16 [pieces, rows, 64] of rows of 576, contiguous, in boxes of box_pieces x 64 x 64.
bool make_map(
    tensor_map::Encode encode, CUtensorMap* map, const void* data, long long rows, int box_pieces) {
  constexpr cuuint64_t kRowBytes = kWidth * sizeof(__nv_bfloat16), kBoxBytes = 128;
  const cuuint64_t sizes[3] = {kBox, static_cast<cuuint64_t>(rows), kPieces};
  const cuuint64_t strides[2] = {kRowBytes, kBoxBytes};
  const cuuint32_t box[3] = {kBox, kTokens, static_cast<cuuint32_t>(box_pieces)};
  const cuuint32_t steps[3] = {1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(data), sizes, strides,
                box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

constexpr int kMaxDevices = 64;

template <int kCluster>
cudaError_t launch(const Maps& maps, const Problem& p, cudaStream_t stream) {
  static bool is_set[kMaxDevices] = {};
  int device;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if (device >= kMaxDevices) return cudaErrorInvalidDevice;
  if (!is_set[device]) {
    error = cudaFuncSetAttribute(attend<kCluster>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 sizeof(Shared));
    if (error != cudaSuccess) return error;
    is_set[device] = true;
  }
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {kCluster, 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(p.num_queries * p.num_heads / kLines, p.num_parts);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = sizeof(Shared);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, attend<kCluster>, maps, p);
}

}  // namespace

extern "C" const char* mla_decode_launch(
    const void* query, const void* cache, const int* block_table, const int* kv_lengths, void* out,
    float* out_lse, long long num_slots, int num_rows, int num_queries, int num_heads,
    int table_stride, int num_parts, int min_tiles, float scale, void* stream) {
  const Problem p = {static_cast<const __nv_bfloat16*>(cache),
                     block_table,
                     kv_lengths,
                     static_cast<__nv_bfloat16*>(out),
                     out_lse,
                     num_rows,
                     num_queries,
                     num_heads,
                     table_stride,
                     num_parts,
                     min_tiles,
                     scale * kLog2E};
  Maps maps;
  tensor_map::Encode encode;
  cudaError_t error = tensor_map::find_encode(&encode);
  if (error == cudaSuccess) {
    const int num_blocks = num_queries * num_heads / kLines, cluster = num_blocks % 2 ? 1 : 2;
    const long long num_lines = static_cast<long long>(num_rows) * num_queries * num_heads;
    const bool is_made = make_map(encode, &maps.query, query, num_lines, kPieces) &&
                         make_map(encode, &maps.values, cache, num_slots, kHalf / cluster) &&
                         make_map(encode, &maps.rope, cache, num_slots, 1);
    const auto stream_ = static_cast<cudaStream_t>(stream);
    error = !is_made       ? cudaErrorInvalidValue
            : cluster == 1 ? launch<1>(maps, p, stream_)
                           : launch<2>(maps, p, stream_);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
