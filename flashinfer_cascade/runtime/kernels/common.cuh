// What the kernels in CUDA C++ share. Each is compiled from this file and its own.
//
// The caller defines T_BF16, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, TOKEN_STRIDE, HEAD_STRIDE (in
// elements), CAUSAL, CAPPED, HAS_ROW_MAP, HAS_SINKS, HAS_LSE, FIRST, WAITS, TRIGGERS.

typedef unsigned int u32;
typedef long long i64;
typedef unsigned short u16;  // a 16-bit number of q, KV and out

constexpr int GROUP = NUM_HEADS / NUM_KV_HEADS;
constexpr int STEPS = HEAD_DIM / 16;  // of the head's dimensions
constexpr int CHUNKS = HEAD_DIM / 8;   // 16 bytes each, of a token
constexpr float LOG2E = 1.4426950408889634f;
#define NOTHING __int_as_float(0xff800000)  // -inf
constexpr unsigned ALL = 0xffffffffu;

__device__ __forceinline__ void load_fragment(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address));
}

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 result;
#if T_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
#endif
  return result;
}

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_of(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ void copy_async(u32 to, const u16* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

__device__ __forceinline__ void copy_or_clear(u32 to, const u16* from, bool is_real) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_real ? 16 : 0));
}
