// Warpgroup matrix products of sm_90a: A from registers, B from shared memory tiles with the 128-byte swizzle.
// Empty on every other target.
#pragma once

#include "device.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
namespace flash_kda {

// Shared memory operand descriptor. A swizzle atom is 8 rows of 128 bytes; `group` is the distance between atoms along
// the rows, `atom` the distance between atoms along the 128-byte direction (used when N runs along it).
__device__ __forceinline__ uint64_t wgmma_desc(uint32_t addr, uint32_t atom, uint32_t group) {
  return static_cast<uint64_t>((addr & 0x3ffff) >> 4) | static_cast<uint64_t>(atom >> 4) << 16 |
         static_cast<uint64_t>(group >> 4) << 32 | uint64_t{1} << 62;
}

// Orders register writes before the products that read them; before the first product and after each rewrite.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }

// Waits until at most kPending committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
}

// Keeps the compiler from reading an accumulator before the wait above it.
template <int kTiles>
__device__ __forceinline__ void pin(float (&acc)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(acc[n][i]) : : "memory");
}

// acc[64 x 16] (+)= A[64 x 16] B^T, B rows of K contiguous.
__device__ __forceinline__ void wgmma_n16(float (&d)[2][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.s32 p, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, 1, 0;\n}"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

#define FLASH_KDA_ACC(n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
// acc[64 x 128] += A[64 x 16] B, B rows of N contiguous.
__device__ __forceinline__ void wgmma_n128_rows(float (&d)[16][4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
      "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,"
      "%61,%62,%63}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
      : FLASH_KDA_ACC(0), FLASH_KDA_ACC(1), FLASH_KDA_ACC(2), FLASH_KDA_ACC(3), FLASH_KDA_ACC(4), FLASH_KDA_ACC(5),
        FLASH_KDA_ACC(6), FLASH_KDA_ACC(7), FLASH_KDA_ACC(8), FLASH_KDA_ACC(9), FLASH_KDA_ACC(10), FLASH_KDA_ACC(11),
        FLASH_KDA_ACC(12), FLASH_KDA_ACC(13), FLASH_KDA_ACC(14), FLASH_KDA_ACC(15)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef FLASH_KDA_ACC

}  // namespace flash_kda
#endif
