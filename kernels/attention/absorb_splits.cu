// The end of absorbed attention for Hopper, from splits of latents: `kernels.attention.absorb`.
//
//   values[t, h]  = (sum over the splits of row t of their share * latents) @ kv_b[h, D:]^T
//   out, scale    = e4m3 of the 128 values of a head, and their scale
//
// A thread block has a head and up to kTiles x 64 rows. Its weights, which no kernel in front
// writes, are copied while those end. Then some warps join the splits of each row and put the
// latents into shared memory, 64 columns at a time, for the warpgroup that multiplies them.

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "../build/hopper_bf16_pairs.cuh"
#include "../build/hopper_tensor_map.cuh"
#include "../build/hopper_wgmma_shared.cuh"
#include "mla_prefill_ptx.cuh"

namespace {

constexpr int kRows = 64;           // of a tile, which a warpgroup multiplies
constexpr int kLatent = 512, kValue = 128;
constexpr int kChunk = 64;          // columns of latents: 128 bytes
constexpr int kChunks = kLatent / kChunk;
constexpr int kRowBytes = kChunk * 2;
constexpr int kLanes = 8;           // that load a row's chunk
constexpr int kTokens = 64;         // of a tile of attention
constexpr float kLargest = 448.0f;  // of e4m3
constexpr float kSmallest = 1e-12f;
constexpr uint64_t kEvictFirst = 0x12F0000000000000;  // as createpolicy makes it

struct Problem {
  CUtensorMap weights;            // bytes [heads * (D + 128), 1024], boxes of 128 x 128
  const __nv_bfloat16* splits;    // [places, heads, 512]
  const float* lse;               // [places, heads]
  const int* kv_lengths;          // [rows]
  uint8_t* out;                   // [rows, heads * 128] e4m3
  float* scale;                   // [heads, scale_stride]
  int num_rows, num_heads, num_parts, min_tiles, nope_dim, scale_stride;
};

template <int kTiles>
struct Kernel {
  static constexpr int kMath = kTiles * 128;  // threads, of which others join
  static constexpr int kJoiningWarps = kTiles == 1 ? 16 : 8;
  static constexpr int kThreads = kMath + kJoiningWarps * 32;
  static constexpr int kGroups = kJoiningWarps * 32 / kLanes;  // of lanes, each with a row
  static constexpr int kRounds = kRows / kGroups;              // rows of a group
  static constexpr int kTurn = kGroups / kChunks;
  // What a lane loads at a time: of each row it has, 2 chunks of so many splits.
  static constexpr int kAhead = 2, kDepth = kTiles == 1 ? 4 : 2;

  struct Shared {
    alignas(1024) uint8_t weights[kChunks][kValue * kRowBytes];
    alignas(1024) uint8_t latents[kChunks][kRows * kRowBytes];
    int first[kTiles * kRows], count[kTiles * kRows];  // of places of a row
    alignas(8) uint64_t weights_full[kChunks];
    uint64_t full[kTiles][kChunks], empty[kChunks];
    uint64_t shares_full;
    float shares[1];  // of the block's places, from its first one on
  };

  static __device__ __forceinline__ int tiles_of(const Problem& p, int row) {
    return row < p.num_rows ? (p.kv_lengths[row] + kTokens - 1) / kTokens : 0;
  }

  // Places of this block's rows, by one warp.
  static __device__ __forceinline__ void find_places(const Problem& p, Shared& s, int first_row) {
    const int lane = threadIdx.x % 32;
    int total = 0;
    for (int row = lane; row < p.num_rows; row += 32) total += tiles_of(p, row);
    total = __reduce_add_sync(~0u, total);
    const int per_part = max((total + p.num_parts - 1) / p.num_parts, p.min_tiles);
    const int last_row = min(first_row + kTiles * kRows, p.num_rows);
    for (int begin = 0, chunk = 0; chunk < last_row; chunk += 32) {
      const int row = chunk + lane, count = tiles_of(p, row);
      int end = count;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int below = __shfl_up_sync(~0u, end, distance);
        if (lane >= distance) end += below;
      }
      end += begin;
      begin = __shfl_sync(~0u, end, 31);
      if (row >= first_row && row < last_row) {
        const int first = (end - count) / per_part;
        s.first[row - first_row] = row + first;
        s.count[row - first_row] = count ? (end - 1) / per_part - first + 1 : 0;
      }
    }
  }

  // What each split counts of its row, by the threads that multiply.
  static __device__ __forceinline__ void find_shares(
      const Problem& p, Shared& s, int head, int num_rows) {
    const int start = s.first[0], stop = s.first[num_rows - 1] + s.count[num_rows - 1];
    for (int place = start + threadIdx.x; place < stop; place += kMath) {
      s.shares[place - start] = p.lse[static_cast<long long>(place) * p.num_heads + head];
    }
    ptx::barrier_sync<kMath>(1);
    const int row = threadIdx.x;
    if (row < num_rows) {
      float* const shares = s.shares + s.first[row] - start;
      const int count = s.count[row];
      float peak = -INFINITY, total = 0.0f;
      for (int i = 0; i < count; ++i) peak = fmaxf(peak, shares[i]);
      // A row that sees nothing must not compute inf - inf.
      if (peak == -INFINITY) peak = 0.0f;
      for (int i = 0; i < count; ++i) total += shares[i] = exp2f(shares[i] - peak);
      const float factor = total == 0.0f ? 0.0f : 1.0f / total;
      for (int i = 0; i < count; ++i) shares[i] *= factor;
    }
    ptx::barrier_arrive(ptx::shared_address(&s.shares_full));
  }

  static __device__ __forceinline__ void add(float (&sum)[8], float share, const uint4& split) {
    const uint32_t words[4] = {split.x, split.y, split.z, split.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] += share * __uint_as_float(words[i] << 16);
      sum[2 * i + 1] += share * __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }

  // What a lane has of a row's chunk.
  struct Unit {
    const uint4* from;  // of its first split
    const float* shares;
    int row, count;
  };

  static __device__ __forceinline__ void join(
      const Problem& p, Shared& s, int head, int num_rows) {
    const int thread = threadIdx.x - kMath, lane = thread % kLanes, group = thread / kLanes;
    const int place_vectors = p.num_heads * kLatent / 8, start = s.first[0];
    bool has_shares = false;
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll 1
      for (int chunk = 0; chunk < kChunks; chunk += kAhead) {
        Unit units[kAhead][kRounds];
        uint4 loaded[kAhead][kRounds][kDepth];
        float sums[kAhead][kRounds][8];
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
#pragma unroll
          for (int r = 0; r < kRounds; ++r) {
            // A row of many splits is shared: each of its chunks is another warp's.
            Unit& unit = units[a][r];
            unit.row = (group + (chunk + a) * kTurn) % kGroups + r * kGroups;
            const int row = tile * kRows + unit.row;
            unit.count = row < num_rows ? s.count[row] : 0;
            const int place = unit.count ? s.first[row] : start;
            unit.shares = s.shares + place - start;
            unit.from = reinterpret_cast<const uint4*>(p.splits) +
                        (static_cast<long long>(place) * p.num_heads + head) * (kLatent / 8) +
                        (chunk + a) * kLanes + lane;
#pragma unroll
            for (int i = 0; i < kDepth; ++i) {
              loaded[a][r][i] = i < unit.count ? __ldcg(unit.from + i * place_vectors)
                                               : make_uint4(0, 0, 0, 0);
            }
          }
        }
        if (!has_shares) ptx::barrier_wait(ptx::shared_address(&s.shares_full), 0);
        has_shares = true;
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
#pragma unroll
          for (int r = 0; r < kRounds; ++r) {
            const Unit& unit = units[a][r];
            float(&sum)[8] = sums[a][r];
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[i] = 0.0f;
#pragma unroll
            for (int i = 0; i < kDepth; ++i) {
              add(sum, i < unit.count ? unit.shares[i] : 0.0f, loaded[a][r][i]);
            }
            for (int first = kDepth; first < unit.count; first += 8) {
              uint4 more[8];
#pragma unroll
              for (int i = 0; i < 8; ++i) {
                more[i] = first + i < unit.count
                              ? __ldcg(unit.from + (first + i) * place_vectors)
                              : make_uint4(0, 0, 0, 0);
              }
#pragma unroll
              for (int i = 0; i < 8; ++i) {
                add(sum, first + i < unit.count ? unit.shares[first + i] : 0.0f, more[i]);
              }
            }
          }
        }
#pragma unroll
        for (int a = 0; a < kAhead; ++a) {
          if (tile) ptx::barrier_wait(ptx::shared_address(&s.empty[chunk + a]), 0);
#pragma unroll
          for (int r = 0; r < kRounds; ++r) {
            const int row = units[a][r].row;
            const float(&sum)[8] = sums[a][r];
            uint4* const to = reinterpret_cast<uint4*>(s.latents[chunk + a] + row * kRowBytes) +
                              (lane ^ row % 8);
            *to = make_uint4(pairs::pack(sum[0], sum[1]), pairs::pack(sum[2], sum[3]),
                             pairs::pack(sum[4], sum[5]), pairs::pack(sum[6], sum[7]));
          }
        }
        ptx::proxy_fence();
        __syncwarp();
        if (threadIdx.x % 32 < kAhead) {
          ptx::barrier_arrive(ptx::shared_address(&s.full[tile][chunk + threadIdx.x % 32]));
        }
      }
    }
  }

  static __device__ __forceinline__ void multiply(Shared& s, int tile, float (&sum)[64]) {
    const bool releases = tile == 0 && threadIdx.x % 32 == 0;  // its place, to the other tile
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      ptx::barrier_wait(ptx::shared_address(&s.weights_full[chunk]), 0);
      ptx::barrier_wait(ptx::shared_address(&s.full[tile][chunk]), 0);
      const uint64_t a = ptx::operand(ptx::shared_address(s.latents[chunk]));
      const uint64_t b = ptx::operand(ptx::shared_address(s.weights[chunk]));
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::WgmmaShared<ptx::Bf16, kValue>::issue(sum, a + 2 * i, b + 2 * i, chunk + i > 0);
      }
      ptx::wgmma_commit();
      if (kTiles > 1 && chunk) {
        ptx::wgmma_wait<1>();
        ptx::barrier_arrive_if(ptx::shared_address(&s.empty[chunk - 1]), releases);
      }
    }
    ptx::wgmma_wait<0>();
    ptx::pin(sum);
    if (kTiles > 1) ptx::barrier_arrive_if(ptx::shared_address(&s.empty[kChunks - 1]), releases);
  }

  static __device__ __forceinline__ uint32_t quantise_pair(float low, float high) {
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
  }

  static __device__ __forceinline__ void store(
      const Problem& p, int head, int row, const float (&sum)[64], int upper) {
    const int lane = threadIdx.x % 4;
    float peak = kSmallest;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      peak = fmaxf(peak, fmaxf(fabsf(sum[4 * j + 2 * upper]), fabsf(sum[4 * j + 2 * upper + 1])));
    }
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
    const float factor = __fdiv_rn(kLargest, peak);
    uint8_t* const to =
        p.out + (static_cast<long long>(row) * p.num_heads + head) * kValue + lane * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const here = sum + 4 * (8 * half + 2 * i) + 2 * upper;
        words[i] = quantise_pair(here[0] * factor, here[1] * factor) |
                   quantise_pair(here[4] * factor, here[5] * factor) << 16;
      }
      pairs::turn_over(words, lane);
      if (row < p.num_rows) {
        *reinterpret_cast<uint4*>(to + half * 64) =
            make_uint4(__byte_perm(words[0], words[1], 0x5410),
                       __byte_perm(words[2], words[3], 0x5410),
                       __byte_perm(words[0], words[1], 0x7632),
                       __byte_perm(words[2], words[3], 0x7632));
      }
    }
    if (lane == 0 && row < p.num_rows) {
      p.scale[static_cast<long long>(head) * p.scale_stride + row] = __fdiv_rn(peak, kLargest);
    }
  }

  static __device__ __forceinline__ void run(const Problem& p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    Shared& s = *reinterpret_cast<Shared*>(memory);
    const int head = blockIdx.x, first_row = blockIdx.y * kTiles * kRows;
    const int num_rows = min(p.num_rows - first_row, kTiles * kRows);
    ptx::launch_dependents();
    if (threadIdx.x == kMath) {
      ptx::prefetch_map(&p.weights);
      for (int i = 0; i < kChunks; ++i) {
        ptx::barrier_init(ptx::shared_address(&s.weights_full[i]), 1);
        ptx::barrier_init(ptx::shared_address(&s.empty[i]), 4);
        for (int tile = 0; tile < kTiles; ++tile) {
          ptx::barrier_init(ptx::shared_address(&s.full[tile][i]), kJoiningWarps);
        }
      }
      ptx::barrier_init(ptx::shared_address(&s.shares_full), kMath);
      ptx::barrier_init_fence();
      for (int i = 0; i < kChunks; ++i) {
        const uint32_t full = ptx::shared_address(&s.weights_full[i]);
        ptx::barrier_expect(full, sizeof(s.weights[i]));
        ptx::copy_box(ptx::shared_address(s.weights[i]), &p.weights, i * kRowBytes,
                      head * (p.nope_dim + kValue) + p.nope_dim, full, kEvictFirst);
      }
    }
    __syncwarp();
    if (threadIdx.x < 32) find_places(p, s, first_row);
    __syncthreads();
    ptx::wait_for_predecessors();
    if (threadIdx.x >= kMath) {
      join(p, s, head, num_rows);
      return;
    }
    find_shares(p, s, head, num_rows);
    const int tile = threadIdx.x / 128;
    float sum[64];
    multiply(s, tile, sum);
    const int row = first_row + tile * kRows + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    store(p, head, row, sum, 0);
    store(p, head, row + 8, sum, 1);
  }
};

template <int kTiles>
__global__ __launch_bounds__(Kernel<kTiles>::kThreads, 1) void absorb_splits(
    const __grid_constant__ Problem problem) {
  Kernel<kTiles>::run(problem);
}

template <int kTiles>
cudaError_t launch(const Problem& p, cudaStream_t stream) {
  const int bytes = sizeof(typename Kernel<kTiles>::Shared) + 4 * (p.num_rows + p.num_parts);
  cudaError_t error = cudaFuncSetAttribute(
      absorb_splits<kTiles>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(p.num_heads, (p.num_rows + kTiles * kRows - 1) / (kTiles * kRows));
  config.blockDim = dim3(Kernel<kTiles>::kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, absorb_splits<kTiles>, p);
}

}  // namespace

// See absorb_splits_cuda.py.
extern "C" const char* absorb_splits_launch(
    const void* splits, const float* lse, const int* kv_lengths, const void* kv_b, void* out,
    float* scale, int num_rows, int num_heads, int num_parts, int min_tiles, int nope_dim,
    int scale_stride, void* stream) {
  Problem p = {};
  p.splits = static_cast<const __nv_bfloat16*>(splits);
  p.lse = lse;
  p.kv_lengths = kv_lengths;
  p.out = static_cast<uint8_t*>(out);
  p.scale = scale;
  p.num_rows = num_rows;
  p.num_heads = num_heads;
  p.num_parts = num_parts;
  p.min_tiles = min_tiles;
  p.nope_dim = nope_dim;
  p.scale_stride = scale_stride;
  cudaError_t error = tensor_map::of_bytes(
      &p.weights, kv_b, num_heads * (nope_dim + kValue), kLatent * 2, kValue);
  if (error == cudaSuccess) {
    const auto on = static_cast<cudaStream_t>(stream);
    error = num_rows <= kRows ? launch<1>(p, on) : launch<2>(p, on);
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
