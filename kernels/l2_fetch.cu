// Asks the second-level cache for bytes that a kernel behind will read: `kernels.l2_fetch`.
//
// Each thread asks for a piece at a time; the first pieces of all rows come before the second ones.

#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int kThreads = 32;
constexpr int kBlocks = 132;      // one thread of all of them for each piece of some 20 MB
constexpr int kPieceBytes = 8192;

struct Problem {
  const uint8_t* rows;
  long long row_stride;
  int num_rows, row_bytes;
};

__global__ __launch_bounds__(kThreads) void fetch(const Problem p) {
  const int pieces = (p.row_bytes + kPieceBytes - 1) / kPieceBytes, total = pieces * p.num_rows;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < total; i += gridDim.x * kThreads) {
    const int begin = i / p.num_rows * kPieceBytes;
    const uint8_t* const from = p.rows + i % p.num_rows * p.row_stride + begin;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from),
                 "r"(min(kPieceBytes, p.row_bytes - begin))
                 : "memory");
  }
}

}  // namespace

extern "C" const char* l2_fetch_launch(
    const void* rows, long long row_stride, int num_rows, int row_bytes, void* stream) {
  const Problem p = {static_cast<const uint8_t*>(rows), row_stride, num_rows, row_bytes};
  fetch<<<kBlocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(p);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
