// Instructions of Hopper that of all kernels only the W4A8 grouped GEMM has.
#pragma once

#include "../build/hopper_ptx.cuh"

namespace ptx {

// Waits for this thread's earlier copy_word calls.
__device__ __forceinline__ void copy_word_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ uint32_t load_half_word(uint32_t from) {
  uint32_t value;
  asm volatile("ld.shared.u16 %0, [%1];" : "=r"(value) : "r"(from));
  return value;
}

__device__ __forceinline__ uint32_t load_word(uint32_t from) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(from));
  return value;
}

__device__ __forceinline__ void store_uint2(uint32_t to, uint2 value) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(value.x), "r"(value.y)
               : "memory");
}

__device__ __forceinline__ void store_uint4(uint32_t to, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ __forceinline__ void store_half_word(uint32_t to, uint16_t value) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(value) : "memory");
}

// What this thread stored to shared memory is seen by matrix instructions that are told of it.
__device__ __forceinline__ void fence_for_matrix_unit() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Descriptor of a K-major operand of two pieces of eight columns of 16 bits, `piece` bytes apart,
// each piece's rows one after the other, without swizzle.
__device__ __forceinline__ uint64_t operand_of_pieces(uint32_t address, uint32_t piece) {
  return (uint64_t{128 >> 4} << 32) | (uint64_t{piece >> 4} << 16) | ((address & 0x3FFFF) >> 4);
}

// Pairs of float16, rounded to nearest.
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

__device__ __forceinline__ uint32_t add_pairs(uint32_t a, uint32_t b) {
  uint32_t sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

// a * b + c
__device__ __forceinline__ uint32_t add_products(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t sum;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// Pairs of bfloat16, rounded to nearest.
__device__ __forceinline__ uint32_t multiply_bfloat16(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// 0 where `by`, as a number without a sign, is 32 or more.
__device__ __forceinline__ uint32_t shift_left(uint32_t value, uint32_t by) {
  uint32_t shifted;
  asm("shl.b32 %0, %1, %2;" : "=r"(shifted) : "r"(value), "r"(by));
  return shifted;
}

// NOTE: as one instruction by itself (__byte_perm) it would not become part of what uses it.
__device__ __forceinline__ uint32_t both_low_halves(uint32_t word) {
  uint32_t both;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\nmov.b32 %0, {low, low};\n}"
      : "=r"(both)
      : "r"(word));
  return both;
}

__device__ __forceinline__ void keep(uint8_t*& pointer) { asm volatile("" : "+l"(pointer)); }

template <int kCount>
__device__ __forceinline__ void pin(uint32_t (&values)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(values[i])::"memory");
}

// What follows the shape in the instruction's name, and its last operands: two signs, and for
// float16 that b is not transposed.
struct HalfOfE4m3 {
  static constexpr char kName[] = "k32.f16.e4m3.e4m3";
  static constexpr char kSigns[] = "1, 1";
};
struct HalfOfHalf {
  static constexpr char kName[] = "k16.f16.f16.f16";
  static constexpr char kSigns[] = "1, 1, 0";
};

// d[64 x kColumns] (+)= a[64 x k] * b[k x kColumns]: k 32 bytes of elements, a in registers, b in
// shared memory; d in float16, a register for two columns.
template <class Element, int kColumns>
struct WgmmaHalf;

template <class Element>
struct WgmmaHalf<Element, 8> {
  static __device__ __forceinline__ void issue(
      uint32_t (&d)[2], const uint32_t* a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %7, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8%8 {"
        "%0, %1"
        "}, {%2, %3, %4, %5}, %6, p, %9;\n}\n"
        : "+r"(d[0]), "+r"(d[1])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "C"(Element::kName),
          "C"(Element::kSigns));
  }
};

template <class Element>
struct WgmmaHalf<Element, 16> {
  static __device__ __forceinline__ void issue(
      uint32_t (&d)[4], const uint32_t* a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16%10 {"
        "%0, %1, %2, %3"
        "}, {%4, %5, %6, %7}, %8, p, %11;\n}\n"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "C"(Element::kName),
          "C"(Element::kSigns));
  }
};

template <class Element>
struct WgmmaHalf<Element, 32> {
  static __device__ __forceinline__ void issue(
      uint32_t (&d)[8], const uint32_t* a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32%14 {"
        "%0, %1, %2, %3, %4, %5, %6, %7"
        "}, {%8, %9, %10, %11}, %12, p, %15;\n}\n"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]),
          "+r"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "C"(Element::kName),
          "C"(Element::kSigns));
  }
};

template <class Element>
struct WgmmaHalf<Element, 48> {
  static __device__ __forceinline__ void issue(
      uint32_t (&d)[12], const uint32_t* a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %17, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48%18 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11"
        "}, {%12, %13, %14, %15}, %16, p, %19;\n}\n"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]),
          "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "C"(Element::kName),
          "C"(Element::kSigns));
  }
};

template <class Element>
struct WgmmaHalf<Element, 64> {
  static __device__ __forceinline__ void issue(
      uint32_t (&d)[16], const uint32_t* a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64%22 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
        "}, {%16, %17, %18, %19}, %20, p, %23;\n}\n"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]),
          "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]),
          "+r"(d[14]), "+r"(d[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "C"(Element::kName),
          "C"(Element::kSigns));
  }
};

template <class Element>
struct WgmmaHalf<Element, 96> {
  static __device__ __forceinline__ void issue(
      uint32_t (&d)[24], const uint32_t* a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %29, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n96%30 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
        "%19, %20, %21, %22, %23"
        "}, {%24, %25, %26, %27}, %28, p, %31;\n}\n"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]),
          "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]),
          "+r"(d[14]), "+r"(d[15]), "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]),
          "+r"(d[21]), "+r"(d[22]), "+r"(d[23])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "C"(Element::kName),
          "C"(Element::kSigns));
  }
};

template <class Element>
struct WgmmaHalf<Element, 128> {
  static __device__ __forceinline__ void issue(
      uint32_t (&d)[32], const uint32_t* a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128%38 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, "
        "%19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
        "}, {%32, %33, %34, %35}, %36, p, %39;\n}\n"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]),
          "+r"(d[7]), "+r"(d[8]), "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]),
          "+r"(d[14]), "+r"(d[15]), "+r"(d[16]), "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]),
          "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), "+r"(d[24]), "+r"(d[25]), "+r"(d[26]), "+r"(d[27]),
          "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "C"(Element::kName),
          "C"(Element::kSigns));
  }
};

}  // namespace ptx
