// FP8 product of few tokens for Hopper.
//
//   out[t, n] = sum over k of x[t, k] * x_scale[t, k / 128] * w[n, k] * w_scale[n / 128, k / 128]
//
// Time goes with the bytes of the weights. A thread block has kRows rows of them and all tokens;
// one warp copies. Weights are the A operand of wgmma, tokens its N, and each warpgroup computes 64
// rows. Of many tokens float instructions take too long, beside which the matrix unit waits: for
// these there is a form with tokens as the A operand, a lane of which has two tokens and one factor
// for all its rows of weights.
// Blocks of a cluster are `across` neighbours in rows, which copy a part of the tokens for each
// other, times `splits` that share a sum: each adds, for some of the tokens, what all of them sent
// into its shared memory, always in the same order.
//
// Weights do not depend on the kernels in front: the first of them are copied while those end.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "../build/hopper_ptx.cuh"
#include "../build/hopper_tensor_map.cuh"
#include "../build/hopper_wgmma_shared.cuh"

namespace {

constexpr int kGroup = 128;  // columns that share a scale
constexpr int kMaxSharedBytes = 227 * 1024;
constexpr uint64_t kEvictFirst = 0x12F0000000000000;  // as createpolicy makes it
constexpr uint64_t kEvictNormal = 0x1000000000000000;

struct Problem {
  CUtensorMap tokens;        // x [T, K], boxes of kTokens / across rows
  CUtensorMap weights;       // [N, K], boxes of kRows
  const float* x_scale;      // [K / 128, pitch]
  const float* w_scale;      // [N / 128, K / 128]
  __nv_bfloat16* out;        // [T, N]
  int num_tokens, n, num_groups, scale_pitch, scale_bytes;
  int across, splits;
  int num_stages, token_stages;  // places of weights and of tokens; as many with weights first
};

// kTokensFirst: tokens are the A operand.
template <int kTokens, int kRows, bool kTokensFirst>
struct Kernel {
  static constexpr int kWarpgroups = (kTokensFirst ? kTokens : kRows) / 64;
  static constexpr int kColumns = kTokensFirst ? kRows : kTokens;  // of the matrix instruction
  static constexpr int kSums = kColumns / 2;                       // of a lane
  static constexpr int kComputing = kWarpgroups * 128;  // threads; one more warpgroup copies
  static constexpr int kThreads = kComputing + 128;
  static constexpr int kTokenBytes = kTokens * kGroup, kWeightBytes = kRows * kGroup;
  static constexpr int kScaleBytes = kTokens * 4;
  static constexpr int kPitch = kRows + 4;  // floats between sums of a token: no bank conflicts
  // What blocks that share no sum keep of it in shared memory, to store whole lines.
  static constexpr int kSumBytes = kTokensFirst ? 0 : kTokens * kPitch * 4;
  // At least so many blocks have the registers of a multiprocessor; of those of many tokens, the
  // computing warpgroups get what the copying one leaves: there are 512 a lane.
  static constexpr int kBlocks = kWarpgroups == 1 || kTokens * kWarpgroups <= 64 ? 2 : 1;
  static constexpr bool kMovesRegisters = kTokens >= 96 || (kTokens == 64 && kWarpgroups == 1);
  // Products of two groups of columns in flight.
  static constexpr bool kOverlaps = kColumns <= 64 || (kColumns <= 128 && kWarpgroups < 3);
  static_assert(!kTokensFirst || kGroup % kRows == 0, "rows have one line of scales");

  // Of eight columns of the matrix instruction, of which a lane has two in each of two rows.
  static constexpr int kOctets = kColumns / 8;
  static constexpr int kOctetBytes = kComputing * 16;

  // Octets, at most, of whose sums a block of a cluster receives the parts.
  static __host__ __device__ constexpr int part_bytes(int splits) {
    return splits == 1 ? 0 : (kOctets + splits - 1) / splits * splits * kOctetBytes;
  }

  // Where operands are, later sums [kTokens, kPitch] if no block shares them.
  static __host__ __device__ constexpr int stage_bytes(int num_stages, int token_stages) {
    const int bytes = num_stages * kWeightBytes + token_stages * kTokenBytes;
    return bytes < kSumBytes ? kSumBytes : bytes;
  }

  // With parts of shared sums [octets, splits, threads]: after the operands, or of many tokens,
  // which leave no room for both, in their place.
  static __host__ __device__ constexpr int operand_bytes(
      int num_stages, int token_stages, int splits) {
    const int stages = stage_bytes(num_stages, token_stages), parts = part_bytes(splits);
    return kTokensFirst ? (stages < parts ? parts : stages) : stages + parts;
  }

  static constexpr int shared_bytes(int num_stages, int token_stages, int splits) {
    return operand_bytes(num_stages, token_stages, splits) + num_stages * 16 +
           token_stages * (kScaleBytes + (kTokensFirst ? 8 : 0)) + 8;
  }

  // Shared memory: weights, tokens, parts, scales of tokens, barriers. Weights first, a place's
  // weights and tokens have a barrier together.
  struct Layout {
    uint32_t weights, tokens, parts, scales, full, tokens_full, empty, received;
    __device__ __forceinline__ Layout(const void* memory, const Problem& p) {
      weights = ptx::shared_address(memory);
      tokens = weights + p.num_stages * kWeightBytes;
      parts = kTokensFirst ? weights : weights + stage_bytes(p.num_stages, p.token_stages);
      scales = weights + operand_bytes(p.num_stages, p.token_stages, p.splits);
      full = scales + p.token_stages * kScaleBytes;
      empty = full + p.num_stages * 8;
      tokens_full = kTokensFirst ? empty + p.num_stages * 8 : full;
      received = empty + p.num_stages * 8 + (kTokensFirst ? p.token_stages * 8 : 0);
    }
  };

  // What this block computes: rows of weights, groups of columns.
  struct Part {
    int rank, split, first_row, first_group, num_steps;
    __device__ __forceinline__ explicit Part(const Problem& p) {
      const int size = p.across * p.splits;
      rank = size == 1 ? 0 : ptx::cluster_rank();
      split = rank / p.across;
      first_row = (blockIdx.x / size * p.across + rank % p.across) * kRows;
      first_group = p.num_groups * split / p.splits;
      num_steps = p.num_groups * (split + 1) / p.splits - first_group;
    }
  };

  static __device__ __forceinline__ void copy_weights(
      const Problem& p, const Part& part, const Layout& at, int step, int stage) {
    const uint32_t full = at.full + stage * 8;
    ptx::barrier_expect(full, kWeightBytes + (kTokensFirst ? 0 : kTokenBytes + p.scale_bytes));
    ptx::copy_box(at.weights + stage * kWeightBytes, &p.weights,
                  (part.first_group + step) * kGroup, part.first_row, full, kEvictFirst);
  }

  static __device__ __forceinline__ void copy_tokens(
      const Problem& p, const Part& part, const Layout& at, int step, int stage) {
    const uint32_t full = at.tokens_full + stage * 8, to = at.tokens + stage * kTokenBytes;
    if (kTokensFirst) ptx::barrier_expect(full, kTokenBytes + p.scale_bytes);
    const int group = part.first_group + step;
    if (p.across == 1) {
      ptx::copy_box(to, &p.tokens, group * kGroup, 0, full);
    } else {
      const int place = part.rank % p.across, rows = kTokens / p.across;
      const uint16_t blocks = ((1 << p.across) - 1) << (part.split * p.across);
      ptx::copy_box_multicast(to + place * rows * kGroup, &p.tokens, group * kGroup, place * rows,
                              full, blocks);
    }
    ptx::copy_bulk(at.scales + stage * kScaleBytes,
                   p.x_scale + static_cast<long long>(group) * p.scale_pitch, p.scale_bytes, full,
                   kEvictNormal);
  }

  // A place in a ring of stages.
  struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance(int num_stages) {
      if (++stage == num_stages) stage = 0, parity ^= 1;
    }
  };

  // Tokens, which the L2 cache has, need fewer places than weights: those of both rings are given
  // back by the same arrivals.
  struct Place {
    Ring weights, tokens;
    __device__ __forceinline__ void advance(const Problem& p) {
      weights.advance(p.num_stages);
      if (kTokensFirst) tokens.advance(p.token_stages);
    }
    __device__ __forceinline__ int token_stage() const {
      return kTokensFirst ? tokens.stage : weights.stage;
    }
  };

  static __device__ __forceinline__ void copy_rest(
      const Problem& p, const Part& part, const Layout& at) {
    Place done;
    for (int step = 0; step + p.token_stages < part.num_steps; ++step) {
      ptx::barrier_wait(at.empty + done.weights.stage * 8, done.weights.parity);
      if (step + p.num_stages < part.num_steps) {
        copy_weights(p, part, at, step + p.num_stages, done.weights.stage);
      }
      copy_tokens(p, part, at, step + p.token_stages, done.token_stage());
      done.advance(p);
    }
  }

  static __device__ __forceinline__ void issue(
      const Layout& at, const Place& place, float (&products)[kSums]) {
    const uint32_t tokens = at.tokens + place.token_stage() * kTokenBytes;
    const uint32_t rows = at.weights + place.weights.stage * kWeightBytes;
    const uint32_t own = threadIdx.x / 128 * 64 * kGroup;
    const uint64_t a = ptx::operand((kTokensFirst ? tokens : rows) + own);
    const uint64_t b = ptx::operand(kTokensFirst ? rows : tokens);
    ptx::barrier_wait(at.full + place.weights.stage * 8, place.weights.parity);
    if (kTokensFirst) {
      ptx::barrier_wait(at.tokens_full + place.tokens.stage * 8, place.tokens.parity);
    }
    ptx::wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      ptx::WgmmaShared<ptx::E4m3, kColumns>::issue(products, a + 2 * i, b + 2 * i, i > 0);
    }
    ptx::wgmma_commit();
  }

  // Weights first: a lane has two rows of one factor, and in each octet two tokens.
  static __device__ __forceinline__ void add_scaled_rows(
      uint32_t scales, float w, const float (&products)[kSums], float (&sum)[kSums]) {
    scales += threadIdx.x % 4 * 8;
#pragma unroll
    for (int j = 0; j < kOctets; ++j) {
      const float2 scale = ptx::load_float2(scales + j * 32);
      const float left = w * scale.x, right = w * scale.y;
      sum[4 * j] += products[4 * j] * left;
      sum[4 * j + 1] += products[4 * j + 1] * right;
      sum[4 * j + 2] += products[4 * j + 2] * left;
      sum[4 * j + 3] += products[4 * j + 3] * right;
    }
  }

  // Tokens first: a lane has two tokens, and in each octet two rows of weights.
  static __device__ __forceinline__ void add_scaled_tokens(
      uint32_t scales, float w, const float (&products)[kSums], float (&sum)[kSums]) {
    scales += (threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * 4;
    const float upper = ptx::load_float(scales), lower = ptx::load_float(scales + 32);
    const float above = w * upper, below = w * lower;
#pragma unroll
    for (int j = 0; j < kOctets; ++j) {
      sum[4 * j] += products[4 * j] * above;
      sum[4 * j + 1] += products[4 * j + 1] * above;
      sum[4 * j + 2] += products[4 * j + 2] * below;
      sum[4 * j + 3] += products[4 * j + 3] * below;
    }
  }

  static __device__ __forceinline__ void add_scaled(
      const Layout& at, const Place& place, float w, float (&products)[kSums],
      float (&sum)[kSums]) {
    const uint32_t scales = at.scales + place.token_stage() * kScaleBytes;
    ptx::pin(products);
    if constexpr (kTokensFirst) add_scaled_tokens(scales, w, products, sum);
    else add_scaled_rows(scales, w, products, sum);
  }

  // Adds the groups of columns: this warpgroup's 64 rows for all tokens, or all rows for its 64
  // tokens. While one group's products are scaled the next one's are computed.
  static __device__ __forceinline__ void compute(
      const Problem& p, const Part& part, const Layout& at, float (&sum)[kSums]) {
    const int lane = threadIdx.x % 32, last_line = (p.n - 1) / kGroup;
    const int own_row =
        part.first_row + (kTokensFirst ? 0 : static_cast<int>(threadIdx.x) / 128 * 64);
    const float* const factors =
        p.w_scale + min(own_row / kGroup, last_line) * p.num_groups + part.first_group;
    const auto factors_from = [&](int step) {
      return step + lane < part.num_steps ? __ldg(factors + step + lane) : 0.0f;
    };
    float factor = 0, next_factor = factors_from(0);
    const bool arrives = lane < p.across;
    const uint32_t empty =
        ptx::address_in(part.split * p.across + (arrives ? lane : 0), at.empty);
    Place done, ahead;
    float even[kSums], odd[kSums];
    const auto begin = [&](float (&products)[kSums]) {
      issue(at, ahead, products);
      ahead.advance(p);
    };
    const auto end = [&](int step, float (&products)[kSums]) {
      if (step % 32 == 0) {
        factor = next_factor;
        next_factor = factors_from(step + 32);
      }
      add_scaled(at, done, __shfl_sync(~0u, factor, step % 32), products, sum);
      __syncwarp();
      if (p.across > 1) {
        if (arrives) ptx::barrier_arrive_remote(empty + done.weights.stage * 8);
      } else if (lane == 0) {
        ptx::barrier_arrive(at.empty + done.weights.stage * 8);
      }
      done.advance(p);
    };
#pragma unroll
    for (int i = 0; i < kSums; ++i) sum[i] = 0;
    if constexpr (!kOverlaps) {
      for (int step = 0; step < part.num_steps; ++step) {
        begin(even);
        ptx::wgmma_wait<0>();
        end(step, even);
      }
      return;
    }
    int step = 0;
    begin(even);
    // NOTE: no products in flight after a condition, else the compiler waits for each instruction.
    for (; step + 2 < part.num_steps; step += 2) {
      begin(odd);
      ptx::wgmma_wait<1>();
      end(step, even);
      begin(even);
      ptx::wgmma_wait<1>();
      end(step + 1, odd);
    }
    if (step + 1 < part.num_steps) {
      begin(odd);
      ptx::wgmma_wait<1>();
      end(step, even);
      ptx::wgmma_wait<0>();
      end(step + 1, odd);
    } else {
      ptx::wgmma_wait<0>();
      end(step, even);
    }
  }

  // Weights first: sums that no other block shares, to where the stages were and from there to out.
  static __device__ __forceinline__ void store(
      const Problem& p, const Part& part, const Layout& at, const float (&sum)[kSums]) {
    constexpr int kQuads = kRows / 4;
    const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
    const uint32_t to = at.weights + (lane % 4 * 2 * kPitch + row) * 4;
    ptx::barrier_sync<kComputing>(1);  // all have read the stages
#pragma unroll
    for (int j = 0; j < kOctets; ++j) {
      const uint32_t token = to + j * 8 * kPitch * 4;
      ptx::store_float(token, sum[4 * j]);
      ptx::store_float(token + kPitch * 4, sum[4 * j + 1]);
      ptx::store_float(token + 32, sum[4 * j + 2]);
      ptx::store_float(token + kPitch * 4 + 32, sum[4 * j + 3]);
    }
    ptx::barrier_sync<kComputing>(1);
    for (int i = threadIdx.x; i < p.num_tokens * kQuads; i += kComputing) {
      const int token = i / kQuads, column = part.first_row + i % kQuads * 4;
      const float4 four = ptx::load_float4(at.weights + (token * kPitch + i % kQuads * 4) * 4);
      if (column >= p.n) continue;
      const __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(four.x, four.y),
                                       __floats2bfloat162_rn(four.z, four.w)};
      *reinterpret_cast<uint2*>(p.out + static_cast<long long>(token) * p.n + column) =
          reinterpret_cast<const uint2&>(pairs);
    }
  }

  // Tokens first: a lane's part of an octet, two neighbours of a token and of the eighth from it.
  static __device__ __forceinline__ void store_octet(
      const Problem& p, const Part& part, int octet, const float4& sum) {
    const int lane = threadIdx.x % 32, token = threadIdx.x / 32 * 16 + lane / 4;
    const int column = part.first_row + octet * 8 + lane % 4 * 2;
    if (column >= p.n) return;
    __nv_bfloat16* const to = p.out + static_cast<long long>(token) * p.n + column;
    if (token < p.num_tokens) {
      *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(sum.x, sum.y);
    }
    if (token + 8 < p.num_tokens) {
      *reinterpret_cast<__nv_bfloat162*>(to + 8ll * p.n) = __floats2bfloat162_rn(sum.z, sum.w);
    }
  }

  // Octets of columns in use go round the blocks of a sum.
  static __device__ __forceinline__ int num_octets(const Problem& p) {
    return kTokensFirst ? kOctets : (p.num_tokens + 7) / 8;
  }

  static __device__ __forceinline__ int num_received(const Problem& p, const Part& part) {
    return (num_octets(p) + p.splits - 1 - part.split) / p.splits;
  }

  static __device__ __forceinline__ void send(
      const Problem& p, const Part& part, const Layout& at, const float (&sum)[kSums]) {
    const uint32_t to = at.parts + (part.split * kComputing + threadIdx.x) * 16;
    int owner = 0, place = 0;
#pragma unroll
    for (int j = 0; j < kOctets; ++j) {
      if (j >= num_octets(p)) break;
      const uint32_t rank = owner * p.across + part.rank % p.across;
      ptx::store_async(ptx::address_in(rank, to + place * p.splits * kOctetBytes), sum + 4 * j,
                       ptx::address_in(rank, at.received));
      if (++owner == p.splits) owner = 0, ++place;
    }
  }

  // Weights first: a lane and the fourth from it have rows that are neighbours; each stores two of
  // one token.
  static __device__ __forceinline__ void store_pairs(
      const Problem& p, const Part& part, int octet, const float4& sum) {
    const int lane = threadIdx.x % 32, is_odd = lane / 4 % 2;
    const int column = part.first_row + threadIdx.x / 32 * 16 + lane / 8 * 2;
    const float upper = __shfl_xor_sync(~0u, is_odd ? sum.x : sum.y, 4);
    const float lower = __shfl_xor_sync(~0u, is_odd ? sum.z : sum.w, 4);
    const int token = octet * 8 + lane % 4 * 2 + is_odd;
    if (token >= p.num_tokens) return;
    __nv_bfloat16* const to = p.out + static_cast<long long>(token) * p.n + column;
    if (column < p.n) {
      *reinterpret_cast<__nv_bfloat162*>(to) =
          is_odd ? __floats2bfloat162_rn(upper, sum.y) : __floats2bfloat162_rn(sum.x, upper);
    }
    if (column + 8 < p.n) {
      *reinterpret_cast<__nv_bfloat162*>(to + 8) =
          is_odd ? __floats2bfloat162_rn(lower, sum.w) : __floats2bfloat162_rn(sum.z, lower);
    }
  }

  // Adds what all blocks of the sum sent here.
  static __device__ __forceinline__ void store_received(
      const Problem& p, const Part& part, const Layout& at) {
    const int number = num_received(p, part);
    if (number) ptx::barrier_wait_cluster(at.received, 0);
    for (int i = 0; i < number; ++i) {
      const uint32_t from = at.parts + (i * p.splits * kComputing + threadIdx.x) * 16;
      float4 sum = ptx::load_float4(from);
      for (int split = 1; split < p.splits; ++split) {
        const float4 more = ptx::load_float4(from + split * kOctetBytes);
        sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
      }
      const int octet = i * p.splits + part.split;
      if constexpr (kTokensFirst) store_octet(p, part, octet, sum);
      else store_pairs(p, part, octet, sum);
    }
  }

  static __device__ __forceinline__ void run(const Problem& p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const Layout at(memory, p);
    const Part part(p);
    const bool is_cluster = p.across * p.splits > 1;
    const bool copies = threadIdx.x == kComputing;
    ptx::launch_dependents();
    if (copies) {
      ptx::prefetch_map(&p.weights);
      ptx::prefetch_map(&p.tokens);
      for (int i = 0; i < p.num_stages; ++i) {
        ptx::barrier_init(at.full + i * 8, 1);
        ptx::barrier_init(at.empty + i * 8, p.across * kWarpgroups * 4);
      }
      for (int i = 0; kTokensFirst && i < p.token_stages; ++i) {
        ptx::barrier_init(at.tokens_full + i * 8, 1);
      }
      ptx::barrier_init(at.received, 1);
      ptx::barrier_init_fence();
      for (int i = 0; i < min(p.num_stages, part.num_steps); ++i) {
        copy_weights(p, part, at, i, i);
      }
      if (p.splits > 1) {
        ptx::barrier_expect(at.received, num_received(p, part) * p.splits * kOctetBytes);
      }
    }
    __syncwarp();
    if (is_cluster) ptx::cluster_arrive_relaxed();
    __syncthreads();

    if (threadIdx.x >= kComputing) {
      if constexpr (kMovesRegisters) ptx::registers_give<40>();
      if (is_cluster) ptx::cluster_wait();
      if (copies) {
        ptx::wait_for_predecessors();
        for (int i = 0; i < min(p.token_stages, part.num_steps); ++i) {
          copy_tokens(p, part, at, i, i);
        }
        copy_rest(p, part, at);
      }
      __syncwarp();
      if (kTokensFirst && is_cluster) ptx::cluster_arrive_relaxed();  // see below
    } else {
      if constexpr (kMovesRegisters) {
        ptx::registers_take<kWarpgroups == 1 ? 216 : kWarpgroups == 2 ? 232 : 152>();
      }
      float sum[kSums];
      if (is_cluster) ptx::cluster_wait();  // others' barriers are there
      compute(p, part, at, sum);
      if (p.splits == 1) {
        if constexpr (!kTokensFirst) {
          store(p, part, at, sum);
        } else {
#pragma unroll
          for (int j = 0; j < kOctets; ++j) {
            const float4 four = {sum[4 * j], sum[4 * j + 1], sum[4 * j + 2], sum[4 * j + 3]};
            store_octet(p, part, j, four);
          }
        }
      } else {
        // Parts come to where stages were once all blocks of the sum have read theirs.
        if (kTokensFirst) ptx::cluster_arrive_relaxed(), ptx::cluster_wait();
        send(p, part, at, sum);
        store_received(p, part, at);
      }
      __syncwarp();
    }
    // Others may still arrive at this block's barriers.
    if (p.across > 1) ptx::cluster_arrive_relaxed(), ptx::cluster_wait();
  }
};

template <int kTokens, int kRows, bool kTokensFirst>
__global__ __launch_bounds__(Kernel<kTokens, kRows, kTokensFirst>::kThreads,
                             Kernel<kTokens, kRows, kTokensFirst>::kBlocks) void
fp8_gemm(const __grid_constant__ Problem problem) {
  Kernel<kTokens, kRows, kTokensFirst>::run(problem);
}

template <int kTokens, int kRows, bool kTokensFirst>
cudaError_t launch(Problem& p, const void* x, const void* weight, cudaStream_t stream) {
  using K = Kernel<kTokens, kRows, kTokensFirst>;
  const int k = p.num_groups * kGroup;
  const int bytes = K::shared_bytes(p.num_stages, p.token_stages, p.splits);
  if (p.num_tokens > kTokens || bytes > kMaxSharedBytes || kTokens % (8 * p.across) ||
      (kTokensFirst && p.across > 1) ||
      (!kTokensFirst && p.token_stages != p.num_stages) || p.token_stages > p.num_stages) {
    return cudaErrorInvalidValue;
  }
  auto* const kernel = fp8_gemm<kTokens, kRows, kTokensFirst>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  error = tensor_map::of_bytes(&p.tokens, x, p.num_tokens, k, kTokens / p.across);
  if (error != cudaSuccess) return error;
  error = tensor_map::of_bytes(&p.weights, weight, p.n, k, kRows);
  if (error != cudaSuccess) return error;

  const int size = p.across * p.splits, rows = kRows * p.across;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(size), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((p.n + rows - 1) / rows * size);
  config.blockDim = dim3(K::kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = size > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, p);
}

template <int kTokens>
cudaError_t launch_weights_first(
    int warpgroups, Problem& p, const void* x, const void* weight, cudaStream_t stream) {
  switch (warpgroups) {
    case 1: return launch<kTokens, 64, false>(p, x, weight, stream);
    case 2: return launch<kTokens, 128, false>(p, x, weight, stream);
    case 3: return launch<kTokens, 192, false>(p, x, weight, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

// x_scale has its rows contiguous, `scale_pitch` floats for a group of columns; see
// fp8_gemm_cuda.py.
extern "C" const char* fp8_gemm_launch(
    const void* x, const float* x_scale, int scale_pitch, const void* weight, const float* w_scale,
    void* out, int num_tokens, int n, int k, int block_tokens, int tokens_first, int warpgroups,
    int across, int splits, int num_stages, int token_stages, void* stream) {
  Problem p = {};
  p.x_scale = x_scale;
  p.w_scale = w_scale;
  p.out = static_cast<__nv_bfloat16*>(out);
  p.num_tokens = num_tokens;
  p.n = n;
  p.num_groups = k / kGroup;
  p.scale_pitch = scale_pitch;
  p.scale_bytes = (num_tokens + 3) / 4 * 16;
  p.across = across;
  p.splits = splits;
  p.num_stages = num_stages;
  p.token_stages = token_stages;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  cudaError_t error = cudaErrorInvalidValue;
  switch (tokens_first ? 0 : block_tokens) {
    case 0: error = launch<128, 128, true>(p, x, weight, on); break;
    case 8: error = launch_weights_first<8>(warpgroups, p, x, weight, on); break;
    case 16: error = launch_weights_first<16>(warpgroups, p, x, weight, on); break;
    case 32: error = launch_weights_first<32>(warpgroups, p, x, weight, on); break;
    case 64: error = launch_weights_first<64>(warpgroups, p, x, weight, on); break;
    case 96: error = launch_weights_first<96>(warpgroups, p, x, weight, on); break;
    case 128: error = launch_weights_first<128>(warpgroups, p, x, weight, on); break;
    default: break;
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
