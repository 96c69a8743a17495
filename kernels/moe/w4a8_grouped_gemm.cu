// W4A8 grouped GEMM for Hopper.
//
//   out[i, n] = sum over k of x[i, k] * x_scale[i, k / 128] * w[e][n, k] * w_scale[e][n, k / 128]
//
// with e the expert of row i. Weights are the A operand of wgmma, turned from four bits to e4m3
// in registers; tokens are its N, so that few tokens cost few columns. A persistent grid walks over
// tiles (expert, tokens, weight rows); one warp copies weights and activations by the bulk copy
// engine, two or three prepare activation scales, two warpgroups compute, in float16. Where
// x_scale[i] is one for all columns, it is left to the end: two sums then take one float instruction
// instead of two.
//
// Weights come in blocks of 128 rows x 128 columns: 8192 bytes in the order in which the threads
// of two warpgroups hold the A operand, then the scale of each row as a share of its unit, whose
// sign says which of two codes the weights have, then these units, powers of two, which all blocks
// of a row have and a tile needs once (w4a8_grouped_gemm_packing.py). In e4m3 the bytes 0..16 are
// the multiples of 2^-9, so a signed word becomes bytes by a mask, or a rotation and a mask, and
// sign and magnitude of zigzag codes by one multiply-add; the factor -2^-9 or 2^-8 is taken out of
// shares and units when they are packed.

#include <cuda_fp16.h>

#include <atomic>

#include "w4a8_grouped_gemm_loop.cuh"
#include "w4a8_grouped_gemm_store.cuh"
#include "w4a8_grouped_gemm_tiles.cuh"

namespace {

using namespace w4a8;

// A thread begins with 168 registers; what those that copy give is all that those that compute can
// take, and one that waits for more waits for ever.
constexpr int kCopyRegisters = 56;
constexpr int kComputeRegisters = 224;
static_assert(kCopyRegisters + 2 * kComputeRegisters <= 3 * 168);

// Cache policies of the bulk copy engine, as createpolicy makes them.
constexpr uint64_t kEvictFirst = 0x12F0000000000000;
constexpr uint64_t kEvictNormal = 0x1000000000000000;

// Tiles that the thread blocks of a launch have asked for; 0 between launches. A launch has the next
// of these, so that those which run at the same time have others.
constexpr unsigned kSlots = 4096;
__device__ int tiles_taken[kSlots];

template <typename F>
struct Kernel {
  static constexpr int kBlocks = F::kNumBlocks, kTokens = F::kMostTokens;
  static constexpr bool kGated = F::kGates, kByRow = F::kHasRowScales;
  using S = typename F::S;
  using Ring = typename F::Ring;
  using Spans = typename F::Spans;
  using Place = typename F::Place;
  template <int kWidth>
  using Sums = typename F::template Sums<kWidth>;
  using Loop = w4a8::Loop<F>;
  using Store = w4a8::Store<F>;

  template <int kWidth>
  static __device__ __forceinline__ void compute(
      S& s, const Problem& p, const Tile& t, Ring& ring, Spans& spans, const Place& at) {
    if constexpr (kByRow) Store::template copy_row_scales<kWidth>(s, p, t, at);
    Sums<kWidth> sum;
    Loop::wait_full(s, ring);
    // All rows of a warpgroup have one code.
    const bool is_signed = __any_sync(~0u, Loop::is_signed(ring.stage, at));
    if (is_signed) Loop::template add_all<kWidth, true>(s, p.num_groups, ring, spans, at, sum);
    else Loop::template add_all<kWidth, false>(s, p.num_groups, ring, spans, at, sum);
    if constexpr (!kGated) Store::template store<kWidth>(p, t, sum, at);
    else if (p.out_scale_stride_group) Store::template store_gated<kWidth, false>(s, p, t, sum, at);
    else Store::template store_gated<kWidth, true>(s, p, t, sum, at);
  }

  // `compute` of the tile's width, which is kWidth or more.
  template <int kWidth>
  static __device__ __forceinline__ void compute_width(
      S& s, const Problem& p, const Tile& t, Ring& ring, Spans& spans, const Place& at) {
    if constexpr (kWidth == kTokens) {
      compute<kWidth>(s, p, t, ring, spans, at);
    } else {
      if (t.width == kWidth) compute<kWidth>(s, p, t, ring, spans, at);
      else compute_width<kWidth + (kWidth < 64 ? kWidth : F::kWider)>(s, p, t, ring, spans, at);
    }
  }

  static __device__ __forceinline__ void copy(
      S& s, const Boxes& boxes, const Problem& p, const Tile& t, Ring& ring, bool& waits) {
    const long long block_row = static_cast<long long>(t.expert) * (p.n / 128) +
                                (kGated ? t.across : t.across * kBlocks);
    const long long row_bytes = static_cast<long long>(p.num_groups) * kBlockBytes;
    const long long block_stride = kGated ? p.n / 256 * row_bytes : row_bytes;
    const uint8_t* from = p.weights + block_row * row_bytes;
    const uint64_t policy = t.only_once ? kEvictFirst : kEvictNormal;
    const CUtensorMap* map = &boxes.map[box_of(t.width)];
    // The last span may have groups that are not there: of them activations are zeros, and weights
    // those of the last one that is.
    const int num_groups = (p.num_groups + kSpan - 1) / kSpan * kSpan;
    const auto copy_weights = [&](int stage, int g) {
      const uint32_t full = ptx::shared_address(&s.full[stage]);
      const int bytes = g < p.num_groups - 1 ? kBlockBytes - kUnitBytes : kBlockBytes;
      ptx::barrier_expect(full, kBlocks * bytes + t.width * kGroup);
      const uint32_t weights = ptx::shared_address(s.weights[stage]);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        ptx::copy_bulk(weights + i * kBlockBytes,
                       from + i * block_stride + min(g, p.num_groups - 1) * kBlockBytes, bytes,
                       full, policy);
      }
    };
    // Of the first tile all stages' weights are on their way before activations are waited for.
    int ahead = 0;
    if (waits) {
#pragma unroll 1
      for (; ahead < S::kStages && ahead < num_groups; ++ahead) copy_weights(ahead, ahead);
      ptx::wait_for_predecessors();
      waits = false;
    }
#pragma unroll 1
    for (int g = 0; g < num_groups; ++g, ring.advance()) {
      const uint32_t full = ptx::shared_address(&s.full[ring.stage]);
      if (g >= ahead) {
        ptx::barrier_wait(ptx::shared_address(&s.empty[ring.stage]), ring.parity ^ 1);
        copy_weights(ring.stage, g);
      }
      ptx::copy_box(ptx::shared_address(s.activations[ring.stage]), map, g * kGroup, t.first_row,
                    full);
    }
  }

  // A token's scales on their way to shared memory, a span of groups at a time.
  struct OneTokensScales {
    const float* from = nullptr;  // of the next span's first group; null: there is no such token
    float next[kSpan];
    int exponent = 0;  // of this span's unit, biased as in float32
    uint4 shares;      // of the unit, float16
    uint16_t carry;

    // Begins to load the next span, where so many groups are left.
    __device__ __forceinline__ void load(long long stride, int left) {
      const bool aligned = stride == 1 && reinterpret_cast<uintptr_t>(from) % sizeof(float4) == 0;
      if (from && aligned && left >= kSpan) {  // each lane's are in lines of their own
#pragma unroll
        for (int i = 0; i < kSpan; i += 4) {
          const float4 four = *reinterpret_cast<const float4*>(from + i);
          next[i] = four.x, next[i + 1] = four.y, next[i + 2] = four.z, next[i + 3] = four.w;
        }
      } else {
#pragma unroll
        for (int i = 0; i < kSpan; ++i) next[i] = from && i < left ? from[i * stride] : 0.0f;
      }
      if (from) from += kSpan * stride;
    }

    // Makes the span that was loaded this one.
    __device__ __forceinline__ void take() {
      constexpr int kInfinite = 255;
      int largest = 0;  // exponent
#pragma unroll
      for (float scale : next) {
        largest = max(largest, static_cast<int>(__float_as_uint(scale) << 1 >> 24));
      }
      // Such that shares are at most 1, and neither a unit nor what divides by it is subnormal. The
      // unit has what is infinite or no number, and zeros the shares: matrix instructions that
      // spread them would pass on to other tokens what times zero is no number.
      const int before = exponent;
      exponent = max(before, largest == kInfinite ? kInfinite : min(largest + 1, 253));
      const float divisor =
          exponent == kInfinite ? 0.0f
                                : __uint_as_float(static_cast<uint32_t>(254 - exponent) << 23);
      const auto pair = [&](int i) {
        const __half2 two = __floats2half2_rn(next[i] * divisor, next[i + 1] * divisor);
        return exponent == kInfinite ? 0u : reinterpret_cast<const uint32_t&>(two);
      };
      shares = make_uint4(pair(0), pair(2), pair(4), pair(6));
      const int shift = min(exponent - before, 126);
      carry = __half_as_ushort(
          __float2half_rn(__uint_as_float(static_cast<uint32_t>(127 - shift) << 23)));
    }

    // bfloat16
    __device__ __forceinline__ uint16_t unit() const {
      return static_cast<uint16_t>(exponent << 7);
    }
  };

  static __device__ __forceinline__ void copy_scales(
      S& s, const Problem& p, const Tile& t, Spans& spans) {
    constexpr int kLanes = 32 * F::kScaleWarps, kRows = (kTokens + kLanes - 1) / kLanes;
    using Scales = TokenScales<kTokens>;
    const int first = threadIdx.x - 9 * 32;
    const float* start = first_scale(p, t);
    OneTokensScales rows[kRows];  // of this lane, kLanes apart
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = first + i * kLanes;
      if (row < t.num_tokens) rows[i].from = start + row * p.scale_stride_row;
      rows[i].load(p.scale_stride_group, p.num_groups);
    }
    // Rows that are 32 apart have places that are 64 bytes apart.
    const uint32_t place = first % 8 / 2 * 16 + first / 32 * 64 + first / 8 % 4 * 4 + first % 2 * 2;
#pragma unroll 1
    for (int left = p.num_groups; left > 0; left -= kSpan) {
#pragma unroll
      for (OneTokensScales& row : rows) row.take();
      // Memory that weights are read from answers late.
#pragma unroll
      for (OneTokensScales& row : rows) row.load(p.scale_stride_group, left - kSpan);
      ptx::barrier_wait(ptx::shared_address(&s.scales_empty[spans.stage]), spans.parity ^ 1);
      Scales& to = s.scales[spans.stage];
      const uint32_t carry = ptx::shared_address(to.carry) + place;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = first + i * kLanes;
        if (row >= kTokens) continue;
        ptx::store_uint4(ptx::shared_address(&to.shares[row]), rows[i].shares);
        const uint32_t own = carry + i * kLanes * 2;
        ptx::store_half_word(own, rows[i].carry);
        ptx::store_half_word(own + sizeof(to.carry), rows[i].unit());
      }
      ptx::fence_for_matrix_unit();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        ptx::barrier_arrive(ptx::shared_address(&s.scales_full[spans.stage]));
      }
      spans.advance();
    }
  }

  // Calls `visit` for each tile of this thread block, in the same order in every warp.
  template <typename Visit>
  static __device__ __forceinline__ void walk(
      S& s, const Problem& p, int tiles_across, Visit visit) {
    Ring ring;
    if constexpr (F::kAsks) {
      for (uint32_t i = 0;; ++i) {
        const Tile t = told(s, i);
        if (!t.width) return;
        visit(t, ring);
      }
    } else {
      const int num_tiles = s.first_tile[p.num_experts];
      int expert = 0;
      for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        visit(locate<F::kLeast, F::kWider>(s, tile, expert, tiles_across), ring);
      }
    }
  }

  // `walk` of the thread that copies, where thread blocks ask: it tells the other warps their
  // tiles. What it asks for is on its way while it copies the tile before.
  template <typename Visit>
  static __device__ __forceinline__ void walk_asking(
      S& s, const Problem& p, int tiles_across, Visit visit) {
    const int num_tiles = s.first_tile[p.num_experts];
    Ring ring;
    int expert = 0;
    int tile = blockIdx.x;
    for (uint32_t i = 0;; ++i) {
      Tile t = {};
      if (tile < num_tiles) t = locate<F::kLeast, F::kWider>(s, tile, expert, tiles_across);
      ptx::barrier_wait(ptx::shared_address(&s.tile_empty[i % 2]), ~i / 2 % 2);
      s.tile[i % 2] = t;
      ptx::barrier_arrive(ptx::shared_address(&s.tile_full[i % 2]));
      if (!t.width) return;
      const int before = atomicAdd(&tiles_taken[p.slot], 1);
      visit(t, ring);
      if (before == num_tiles - 1) tiles_taken[p.slot] = 0;  // each tile asks once: nobody is left
      tile = gridDim.x + before;
    }
  }

  // The i-th tile of this thread block.
  static __device__ __forceinline__ Tile told(S& s, uint32_t i) {
    ptx::barrier_wait(ptx::shared_address(&s.tile_full[i % 2]), i / 2 % 2);
    const Tile t = s.tile[i % 2];
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::barrier_arrive(ptx::shared_address(&s.tile_empty[i % 2]));
    return t;
  }

  static __device__ __forceinline__ void run(const Boxes& boxes, const Problem& p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    S& s = *reinterpret_cast<S*>(memory);
    const int tiles_across = p.n / F::kRows;
    const int warp = threadIdx.x / 32;
    if (threadIdx.x < kNumBoxes) ptx::prefetch_map(&boxes.map[threadIdx.x]);
    if (p.leads) ptx::launch_dependents();
    if (!p.early) ptx::wait_for_predecessors();
    if (warp == 0) plan<kTokens, F::kWider>(s, p, tiles_across);
    if (threadIdx.x == 32) {
      for (int i = 0; i < S::kStages; ++i) {
        ptx::barrier_init(ptx::shared_address(&s.full[i]), 1);   // the copying thread
        ptx::barrier_init(ptx::shared_address(&s.empty[i]), 8);  // each computing warp
      }
      if constexpr (!kByRow) {
        for (int i = 0; i < kSpans; ++i) {
          ptx::barrier_init(ptx::shared_address(&s.scales_full[i]), F::kScaleWarps);
          ptx::barrier_init(ptx::shared_address(&s.scales_empty[i]), 8);
        }
      }
      if constexpr (F::kAsks) {
        for (int i = 0; i < 2; ++i) {
          ptx::barrier_init(ptx::shared_address(&s.tile_full[i]), 1);
          ptx::barrier_init(ptx::shared_address(&s.tile_empty[i]), 8 + F::kScaleWarps);
        }
      }
      ptx::barrier_init_fence();
    }
    __syncthreads();

    if (warp >= 8) {
      ptx::registers_give<kCopyRegisters>();
      bool waits = p.early && warp == 8;
      if (p.early && warp != 8) ptx::wait_for_predecessors();
      if (warp == 8) {
        if (threadIdx.x % 32 == 0) {
          const auto visit = [&](const Tile& t, Ring& ring) { copy(s, boxes, p, t, ring, waits); };
          if constexpr (F::kAsks) walk_asking(s, p, tiles_across, visit);
          else walk(s, p, tiles_across, visit);
        }
      } else if constexpr (!kByRow) {
        if (warp <= 8 + F::kScaleWarps) {
          Spans spans;
          walk(s, p, tiles_across, [&](const Tile& t, Ring&) { copy_scales(s, p, t, spans); });
        }
      }
      // Without a tile, too: what follows takes this kernel's end for that of all before it.
      if (waits) ptx::wait_for_predecessors();
    } else {
      ptx::registers_take<kComputeRegisters>();
      const Place at = F::place(s);
      Spans spans;
      if (kByRow && p.early) ptx::wait_for_predecessors();
      // NOTE: were this a function, matrix instructions would be made to wait for each other.
      walk(s, p, tiles_across, [&](const Tile& t, Ring& ring) __attribute__((always_inline)) {
        compute_width<F::kLeast>(s, p, t, ring, spans, at);
      });
    }
  }
};

template <typename F>
__global__ __launch_bounds__(kThreads, 1) void grouped_gemm(
    const __grid_constant__ Boxes boxes, const __grid_constant__ Problem problem) {
  Kernel<F>::run(boxes, problem);
}

// Maps of activations [num_rows, 128 * num_groups].
cudaError_t make_boxes(Boxes* boxes, const void* activations, const Problem& p) {
  for (int rows = 8; rows <= 128; rows += rows < 32 ? rows : 32) {
    const cudaError_t error = tensor_map::of_bytes(
        &boxes->map[box_of(rows)], activations, p.num_rows, p.num_groups * kGroup, rows);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

constexpr int kMaxDevices = 64;
constexpr int kMostSharedBytes = 227 * 1024;  // that a thread block can have

template <typename F>
cudaError_t launch_with(const Boxes& boxes, const Problem& p, cudaStream_t stream) {
  constexpr int bytes = sizeof(typename F::S);
  static_assert(bytes <= kMostSharedBytes);
  static int num_multiprocessors[kMaxDevices] = {};
  auto* const kernel = grouped_gemm<F>;
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

template <int kBlocks, int kTokens, bool kGated = false>
cudaError_t launch(const Boxes& boxes, const Problem& p, cudaStream_t stream) {
  return p.scale_stride_group ? launch_with<Form<kBlocks, kTokens, kGated, false>>(boxes, p, stream)
                              : launch_with<Form<kBlocks, kTokens, kGated, true>>(boxes, p, stream);
}

// The same of tiles that have a form which gates.
template <int kTokens>
cudaError_t launch_pair(const Boxes& boxes, const Problem& p, cudaStream_t stream) {
  return p.out_scales ? launch<2, kTokens, true>(boxes, p, stream)
                      : launch<2, kTokens>(boxes, p, stream);
}

}  // namespace

// Tiles that a caller may choose among; see w4a8_grouped_gemm_cuda.py.
extern "C" const char* w4a8_grouped_gemm_launch(
    int variant, const void* activations, const float* scales, long long scale_stride_expert,
    long long scale_stride_row, long long scale_stride_group, const void* weights,
    const int* counts, void* out, float* out_scales, long long out_scale_stride_expert,
    long long out_scale_stride_group, int num_experts, int capacity, int num_rows, int n, int k,
    int early, int leads, void* stream) {
  static std::atomic<unsigned> num_launches = 0;
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
                     leads != 0,
                     static_cast<int>(num_launches++ % kSlots)};
  Boxes boxes;
  cudaError_t error = num_experts <= kMaxExperts ? make_boxes(&boxes, activations, p)
                                                 : cudaErrorInvalidValue;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (error == cudaSuccess) {
    switch (variant) {
      case 0: error = launch_pair<64>(boxes, p, on); break;
      case 1: error = launch<1, 128>(boxes, p, on); break;
      case 2: error = launch_pair<128>(boxes, p, on); break;
      default: error = cudaErrorInvalidValue;
    }
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
