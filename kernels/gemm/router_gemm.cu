// Logits of the gate for Hopper: few tokens, few experts, a long sum.
//
//   out[t, e] = sum over k of hidden[t, k] * weight[e, k]
//
// Weights are the A operand of wgmma, tokens its N. A thread block has 64 experts, kTokens tokens and
// a part of the sum, all of whose operands are asked for at once: there is room for them. The blocks
// of a cluster share a sum: each adds, for some of the tokens, what all of them sent into its shared
// memory, always in the same order.
//
// Weights do not depend on the kernels in front: they are copied while those end.

#include <cuda_runtime.h>

#include "../build/hopper_ptx.cuh"
#include "../build/hopper_tensor_map.cuh"
#include "../build/hopper_wgmma_shared.cuh"

namespace {

constexpr int kExperts = 64;
constexpr int kThreads = 128;
constexpr int kGroup = 64;  // of K: a line of a tile
constexpr int kLineBytes = 2 * kGroup;
constexpr int kMaxSharedBytes = 227 * 1024;

struct Problem {
  CUtensorMap tokens;   // hidden [T, K], boxes of kTokens rows
  CUtensorMap weights;  // [E, K], boxes of kExperts rows
  float* out;           // [T, E]
  int num_tokens, n, num_groups, splits;
};

template <int kTokens>
struct Kernel {
  static constexpr int kWeightBytes = kExperts * kLineBytes, kTokenBytes = kTokens * kLineBytes;
  static constexpr int kStepBytes = kWeightBytes + kTokenBytes;
  // Of eight tokens, which are the columns that a lane has four sums of, in each of two rows.
  static constexpr int kOctets = kTokens / 8;
  static constexpr int kOctetBytes = kThreads * 16;
  // Parts of sums are received where the operands were, if there is no room after them.
  static constexpr bool kReuses = kTokens >= 64;

  static __host__ __device__ int num_steps(const Problem& p) {
    return (p.num_groups + p.splits - 1) / p.splits;
  }

  // Shared memory: operands; parts of sums [octets, splits, threads]; barriers.
  static __host__ __device__ int parts_at(const Problem& p) {
    return kReuses ? 0 : num_steps(p) * kStepBytes;
  }

  static __host__ __device__ int barriers_at(const Problem& p) {
    const int parts = (kOctets + p.splits - 1) / p.splits * p.splits * kOctetBytes;
    const int operands = num_steps(p) * kStepBytes, end = parts_at(p) + parts;
    return operands < end ? end : operands;
  }

  static __host__ int shared_bytes(const Problem& p) {
    return barriers_at(p) + (num_steps(p) + 1) * 8;
  }

  static __device__ __forceinline__ void run(const Problem& p) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t operands = ptx::shared_address(memory), parts = operands + parts_at(p);
    const uint32_t received = operands + barriers_at(p), full = received + 8;
    const int lane = threadIdx.x % 32, split = ptx::cluster_rank();
    const int first_expert = blockIdx.x / p.splits * kExperts, first_token = blockIdx.y * kTokens;
    const int num_tokens = min(kTokens, p.num_tokens - first_token);
    const int first_group = p.num_groups * split / p.splits;
    const int steps = p.num_groups * (split + 1) / p.splits - first_group;
    // Octets of tokens go round the blocks of a sum.
    const int num_received = ((num_tokens + 7) / 8 + p.splits - 1 - split) / p.splits;
    ptx::launch_dependents();
    if (threadIdx.x == 0) {
      ptx::prefetch_map(&p.weights);
      ptx::prefetch_map(&p.tokens);
      for (int i = 0; i < steps; ++i) ptx::barrier_init(full + i * 8, 1);
      ptx::barrier_init(received, 1);
      ptx::barrier_init_fence();
      for (int i = 0; i < steps; ++i) {
        ptx::barrier_expect(full + i * 8, kStepBytes);
        ptx::copy_box(operands + i * kStepBytes, &p.weights, (first_group + i) * kLineBytes,
                      first_expert, full + i * 8);
      }
      if (num_received) ptx::barrier_expect(received, num_received * p.splits * kOctetBytes);
    }
    __syncwarp();
    ptx::cluster_arrive_relaxed();
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::wait_for_predecessors();
      for (int i = 0; i < steps; ++i) {
        ptx::copy_box(operands + i * kStepBytes + kWeightBytes, &p.tokens,
                      (first_group + i) * kLineBytes, first_token, full + i * 8);
      }
    }
    __syncwarp();

    float sum[kTokens / 2];
#pragma unroll
    for (int i = 0; i < kTokens / 2; ++i) sum[i] = 0;
    for (int i = 0; i < steps; ++i) {
      const uint64_t a = ptx::operand(operands + i * kStepBytes);
      const uint64_t b = ptx::operand(operands + i * kStepBytes + kWeightBytes);
      ptx::barrier_wait(full + i * 8, 0);
      ptx::wgmma_fence();
#pragma unroll
      for (int j = 0; j < kGroup / 16; ++j) {
        ptx::WgmmaShared<ptx::Bf16, kTokens>::issue(sum, a + 2 * j, b + 2 * j, 1);
      }
      ptx::wgmma_commit();
    }
    ptx::wgmma_wait<0>();
    ptx::pin(sum);
    ptx::cluster_wait();  // others' barriers are there
    if (kReuses) ptx::cluster_arrive_relaxed(), ptx::cluster_wait();  // others' operands are read
    send(p, sum, parts + (split * kThreads + threadIdx.x) * 16, received, num_tokens);

    const int column = first_expert + threadIdx.x / 32 * 16 + lane / 4;
    if (num_received) ptx::barrier_wait_cluster(received, 0);
    for (int i = 0; i < num_received; ++i) {
      const uint32_t from = parts + (i * p.splits * kThreads + threadIdx.x) * 16;
      float4 total = ptx::load_float4(from);
      for (int other = 1; other < p.splits; ++other) {
        const float4 more = ptx::load_float4(from + other * kOctetBytes);
        total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
      }
      const int token = (i * p.splits + split) * 8 + lane % 4 * 2;
      float* const to = p.out + static_cast<long long>(first_token + token) * p.n + column;
      const bool here = token < num_tokens, next = token + 1 < num_tokens;
      if (here && column < p.n) to[0] = total.x;
      if (next && column < p.n) to[p.n] = total.y;
      if (here && column + 8 < p.n) to[8] = total.z;
      if (next && column + 8 < p.n) to[p.n + 8] = total.w;
    }
  }

  static __device__ __forceinline__ void send(
      const Problem& p, const float (&sum)[kTokens / 2], uint32_t to, uint32_t received,
      int num_tokens) {
    int owner = 0, place = 0;
#pragma unroll
    for (int j = 0; j < kOctets; ++j) {
      if (j * 8 >= num_tokens) break;
      ptx::store_async(ptx::address_in(owner, to + place * p.splits * kOctetBytes), sum + 4 * j,
                       ptx::address_in(owner, received));
      if (++owner == p.splits) owner = 0, ++place;
    }
  }
};

template <int kTokens>
__global__ __launch_bounds__(kThreads) void router_gemm(const __grid_constant__ Problem problem) {
  Kernel<kTokens>::run(problem);
}

template <int kTokens>
cudaError_t launch(Problem& p, const void* hidden, const void* weight, int k, cudaStream_t stream) {
  const int bytes = Kernel<kTokens>::shared_bytes(p);
  if (bytes > kMaxSharedBytes || p.num_groups < p.splits) return cudaErrorInvalidValue;
  auto* const kernel = router_gemm<kTokens>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  error = tensor_map::of_bytes(&p.tokens, hidden, p.num_tokens, 2 * k, kTokens);
  if (error != cudaSuccess) return error;
  error = tensor_map::of_bytes(&p.weights, weight, p.n, 2 * k, kExperts);
  if (error != cudaSuccess) return error;

  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(p.splits), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3((p.n + kExperts - 1) / kExperts * p.splits,
                        (p.num_tokens + kTokens - 1) / kTokens);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return cudaLaunchKernelEx(&config, kernel, p);
}

}  // namespace

extern "C" const char* router_gemm_launch(
    const void* hidden, const void* weight, float* out, int num_tokens, int n, int k,
    int block_tokens, int splits, void* stream) {
  Problem p = {};
  p.out = out;
  p.num_tokens = num_tokens;
  p.n = n;
  p.num_groups = (k + kGroup - 1) / kGroup;
  p.splits = splits;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  cudaError_t error = cudaErrorInvalidValue;
  switch (block_tokens) {
    case 8: error = launch<8>(p, hidden, weight, k, on); break;
    case 16: error = launch<16>(p, hidden, weight, k, on); break;
    case 32: error = launch<32>(p, hidden, weight, k, on); break;
    case 64: error = launch<64>(p, hidden, weight, k, on); break;
    default: break;
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
