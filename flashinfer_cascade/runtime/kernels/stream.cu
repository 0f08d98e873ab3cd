// Attention over narrow segments: the stream of `segments._stream_kernel`, for tensor cores from sm_80 on.
//
// Every warp works on a run of its own: it copies tiles of KV into a ring in shared memory some tiles ahead, and waits
// for no other warp. Tokens lie along the rows of the matrix instructions and the packed query heads along the columns
// (S^T = K Q^T, O^T = V^T P^T), so that eight columns are enough where Triton's kernel pads to sixteen rows.
//
// The caller defines T_BF16, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, PAGE_STRIDE, TOKEN_STRIDE, HEAD_STRIDE (in
// elements), COLUMNS (8 or 16: packed query heads), TILE (KV tokens, a multiple of 16), STAGES, WARPS, CAUSAL, CAPPED,
// HAS_ROW_MAP, HAS_SINKS, HAS_LSE, WAITS, TRIGGERS.
//
// Source of the fragments' layouts: PTX ISA, "Matrix fragments for mma.m16n8k16" and "ldmatrix".

typedef unsigned int u32;
typedef long long i64;
typedef unsigned short u16;  // a 16-bit number of q, KV and out

constexpr int GROUP = NUM_HEADS / NUM_KV_HEADS;
constexpr int BLOCKS = TILE / 16;        // of tokens
constexpr int HALVES = COLUMNS / 8;      // of columns
constexpr int STEPS = HEAD_DIM / 16;     // of the head's dimensions
constexpr int CHUNKS = HEAD_DIM / 8;     // 16 bytes each, of a token
constexpr int TILE_BYTES = TILE * HEAD_DIM * 2;
constexpr int STAGE_BYTES = 2 * TILE_BYTES;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float NOTHING = -__builtin_huge_valf();

struct Item {
  int first_row, num_rows, first_page, num_tokens;
};
struct Place {
  int partial, is_lone, slot, kv_start;
};

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if T_BF16
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void load_fragment(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address));
}

__device__ __forceinline__ void load_transposed(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address));
}

__device__ __forceinline__ u32 transpose(u32 fragment) {
  u32 result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(fragment));
  return result;
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

__device__ __forceinline__ void copy_async(u32 to, const u16* from, bool is_real) {
  int bytes = is_real ? 16 : 0;  // the rest becomes 0
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}

__device__ __forceinline__ float across_rows(float x, bool is_sum) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) {
    float other = __shfl_xor_sync(0xffffffffu, x, lanes);
    x = is_sum ? x + other : fmaxf(x, other);
  }
  return x;
}

// Copy one tile of K and V: a lane takes one chunk of every other token, or of more where tokens are shorter.
__device__ __forceinline__ void copy_tile(u32 stage, const u16* k, const u16* v, const int* pages, int page, int token,
                                          int num_tokens, int lane) {
  constexpr int AT_ONCE = 32 / (CHUNKS < 32 ? CHUNKS : 32);  // tokens
  const int chunk = lane % CHUNKS;
#pragma unroll
  for (int row = 0; row < TILE; row += AT_ONCE) {
    int in_tile = row + lane / CHUNKS;
    int at = token + in_tile;
    i64 offset;
    if (PAGE_SIZE % TILE == 0) {  // a tile lies in one page
      offset = (i64)page * PAGE_STRIDE + (i64)(at % PAGE_SIZE) * TOKEN_STRIDE;
    } else {
      int id = at < num_tokens ? __ldg(pages + at / PAGE_SIZE) : 0;
      offset = (i64)id * PAGE_STRIDE + (i64)(at % PAGE_SIZE) * TOKEN_STRIDE;
    }
    bool is_real = at < num_tokens;
    offset = is_real ? offset : 0;
    u32 to = stage + in_tile * HEAD_DIM * 2 + ((chunk ^ (in_tile & 7)) << 4);
    copy_async(to, k + offset + chunk * 8, is_real);
    copy_async(to + TILE_BYTES, v + offset + chunk * 8, is_real);
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    stream(const u16* __restrict__ q, const u16* __restrict__ k_cache, const u16* __restrict__ v_cache,
           const int* __restrict__ items, const int* __restrict__ runs, const int* __restrict__ pages,
           const int* __restrict__ row_map, const int* __restrict__ row_pos, const int* __restrict__ partial_indptr,
           u16* __restrict__ partials, float* __restrict__ partial_lse, u16* __restrict__ out, float* __restrict__ lse,
           const float* __restrict__ sinks, float scale, float soft_cap, float v_scale, i64 q_row_stride,
           i64 q_head_stride, i64 out_row_stride, i64 out_head_stride, int num_runs) {
#if TRIGGERS
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int number = blockIdx.x * WARPS + warp;
  const int head = number % NUM_KV_HEADS, run = number / NUM_KV_HEADS;
  const int* record = runs + run * 8;
  const int num_tiles = run < num_runs ? __ldg(record + 4) : 0;
  if (num_tiles > 0) {
    const u32 ring = (u32)__cvta_generic_to_shared(memory) + warp * STAGES * STAGE_BYTES;
    const u16* k_head = k_cache + (i64)head * HEAD_STRIDE;
    const u16* v_head = v_cache + (i64)head * HEAD_STRIDE;
    const int row_in_8 = lane / 4, pair = lane % 4 * 2;  // of a fragment
    const int4* table = (const int4*)items;
    int at_item = __ldg(record + 3);
    auto read = [&](int number) {
      int4 x = __ldg(table + 2 * number);
      return Item{x.x, x.y, x.z, x.w};
    };

    // What is copied next, some tiles ahead of what is computed: an item's fields are read one item ahead, its page one
    // tile ahead. The list ends with an item of zeros; behind it lie numbers that are read and not used.
    int copied_item = at_item, copied_token = __ldg(record + 5), num_copied = 0;
    Item copying = read(copied_item), copying_next = read(copied_item + 1);
    int page = __ldg(pages + copying.first_page + copied_token / PAGE_SIZE);
    auto copy_next = [&]() {
      if (num_copied < num_tiles) {
        u32 stage = ring + num_copied % STAGES * STAGE_BYTES;
        copy_tile(stage, k_head, v_head, pages + copying.first_page, page, copied_token, copying.num_tokens, lane);
        num_copied++;
        copied_token += TILE;
        if (copied_token >= copying.num_tokens) {
          copied_token = 0;
          copied_item++;
          copying = copying_next;
          if (num_copied < num_tiles) copying_next = read(copied_item + 1);
        }
        if (num_copied < num_tiles) page = __ldg(pages + copying.first_page + copied_token / PAGE_SIZE);
      }
      asm volatile("cp.async.commit_group;");
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) copy_next();

    // What is computed: the query heads of an item are read while the item before is at work.
    const int column = row_in_8;  // of a transposed fragment: packed query head, and 8 more in the second half
    u32 queries[HALVES][STEPS][2], queries_next[HALVES][STEPS][2];
    int rows[HALVES], rows_next[HALVES];
    auto row_of = [&](const Item& item, int half) {
      int packed = half * 8 + column;
      int row = item.first_row + packed / GROUP;
      bool is_real = packed < item.num_rows * GROUP;
#if HAS_ROW_MAP
      row = is_real ? __ldg(row_map + row) : 0;
#endif
      return is_real ? row : -1;
    };
    auto read_queries = [&](const int (&of_rows)[HALVES], u32(&into)[HALVES][STEPS][2]) {
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        int row = of_rows[half] < 0 ? 0 : of_rows[half];
        int in_group = (half * 8 + column) % GROUP;
        const u16* from = q + row * q_row_stride + (head * GROUP + in_group) * q_head_stride + pair;
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
          for (int k = 0; k < 2; k++)
            into[half][step][k] = of_rows[half] < 0 ? 0u : __ldg((const u32*)(from + step * 16 + k * 8));
      }
    };
    Item item = read(at_item), next = read(at_item + 1);
#pragma unroll
    for (int half = 0; half < HALVES; half++) rows_next[half] = row_of(item, half);
    read_queries(rows_next, queries_next);

    float acc[HALVES][STEPS][4];
    float highest[HALVES][2], total[HALVES][2];
    int visible[HALVES][2];
    int token = __ldg(record + 5);
    bool begins = true;
    Place place;
    for (int tile = 0; tile < num_tiles; tile++) {
      if (begins) {
        begins = false;
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
          rows[half] = rows_next[half];
#pragma unroll
          for (int step = 0; step < STEPS; step++) {
            queries[half][step][0] = queries_next[half][step][0];
            queries[half][step][1] = queries_next[half][step][1];
#pragma unroll
            for (int i = 0; i < 4; i++) acc[half][step][i] = 0.f;
          }
          highest[half][0] = highest[half][1] = NOTHING;
          total[half][0] = total[half][1] = 0.f;
        }
        int4 x = __ldg(table + 2 * at_item + 1);
        place = Place{x.x, x.y, x.z, x.w};
#if CAUSAL
#pragma unroll
        for (int half = 0; half < HALVES; half++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            int packed = half * 8 + pair + i;
            bool is_real = packed < item.num_rows * GROUP;
            int sees = is_real ? __ldg(row_pos + item.first_row + packed / GROUP) + 1 - place.kv_start : 0;
            visible[half][i] = min(sees, item.num_tokens);
          }
#endif
        if (tile + 1 < num_tiles) {
#pragma unroll
          for (int half = 0; half < HALVES; half++) rows_next[half] = row_of(next, half);
          read_queries(rows_next, queries_next);
        }
      }
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
      __syncwarp();
      copy_next();  // into the stage of the tile before
      const u32 k_tile = ring + tile % STAGES * STAGE_BYTES, v_tile = k_tile + TILE_BYTES;

      float logits[BLOCKS][HALVES][4];
#pragma unroll
      for (int block = 0; block < BLOCKS; block++) {
#pragma unroll
        for (int half = 0; half < HALVES; half++)
#pragma unroll
          for (int i = 0; i < 4; i++) logits[block][half][i] = 0.f;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
          u32 a[4];
          int row = block * 16 + lane % 16, chunk = step * 2 + lane / 16;
          load_fragment(a, k_tile + row * HEAD_DIM * 2 + ((chunk ^ (row & 7)) << 4));
#pragma unroll
          for (int half = 0; half < HALVES; half++)
            multiply(logits[block][half], a, queries[half][step][0], queries[half][step][1]);
        }
      }
      float step_scale = scale;
#if CAPPED
      step_scale = 1.f;
#pragma unroll
      for (int block = 0; block < BLOCKS; block++)
#pragma unroll
        for (int half = 0; half < HALVES; half++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            float e = exp2_of(logits[block][half][i] * (scale * 2.f * LOG2E));
            logits[block][half][i] = soft_cap * (1.f - __fdividef(2.f, e + 1.f)) * LOG2E;
          }
#endif
#if !CAUSAL
      if (token + TILE > item.num_tokens)
#endif
      {
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
#pragma unroll
          for (int half = 0; half < HALVES; half++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
              int at = token + block * 16 + row_in_8 + i / 2 * 8;
#if CAUSAL
              bool is_seen = at < visible[half][i % 2];
#else
              bool is_seen = at < item.num_tokens;
#endif
              logits[block][half][i] = is_seen ? logits[block][half][i] : NOTHING;
            }
      }
      u32 weights[BLOCKS][HALVES][2];
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        float base[2], old[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float most = NOTHING;
#pragma unroll
          for (int block = 0; block < BLOCKS; block++)
            most = fmaxf(most, fmaxf(logits[block][half][i], logits[block][half][i + 2]));
          most = fmaxf(highest[half][i], across_rows(most, false) * step_scale);
          base[i] = most;
#if CAUSAL
          base[i] = most == NOTHING ? 0.f : most;  // nothing seen yet
#endif
          old[i] = exp2_of(highest[half][i] - base[i]);
          highest[half][i] = most;
          float sum = 0.f;
#pragma unroll
          for (int block = 0; block < BLOCKS; block++)
#pragma unroll
            for (int k = 0; k < 4; k += 2) {
              float& x = logits[block][half][i + k];
              x = exp2_of(x * step_scale - base[i]);
              sum += x;
            }
          total[half][i] = total[half][i] * old[i] + sum;
        }
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
          float(&x)[4] = logits[block][half];
          weights[block][half][0] = transpose(pack(x[0], x[1]));
          weights[block][half][1] = transpose(pack(x[2], x[3]));
        }
        if (__any_sync(0xffffffffu, old[0] != 1.f || old[1] != 1.f)) {
#pragma unroll
          for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[half][step][i] *= old[i % 2];
        }
      }
#pragma unroll
      for (int block = 0; block < BLOCKS; block++)
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
          u32 a[4];
          int row = block * 16 + lane % 8 + lane / 16 * 8, chunk = step * 2 + lane / 8 % 2;
          load_transposed(a, v_tile + row * HEAD_DIM * 2 + ((chunk ^ (row & 7)) << 4));
#pragma unroll
          for (int half = 0; half < HALVES; half++)
            multiply(acc[half][step], a, weights[block][half][0], weights[block][half][1]);
        }

      const bool ends = token + TILE >= item.num_tokens;
      if (ends || tile + 1 == num_tiles) {
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
          if (half * 8 >= item.num_rows * GROUP) break;
          float factor[2], piece_lse[2];
#pragma unroll
          for (int i = 0; i < 2; i++) {
            float sum = across_rows(total[half][i], true);
            piece_lse[i] = sum > 0.f ? highest[half][i] + log2_of(sum) : NOTHING;
            factor[i] = sum > 0.f ? __fdividef(1.f, sum) : 0.f;
            if (place.is_lone) {
              factor[i] *= v_scale;
#if HAS_SINKS
              int in_group = (half * 8 + pair + i) % GROUP;
              float sink = __ldg(sinks + head * GROUP + in_group) * LOG2E;
              float most = fmaxf(piece_lse[i], sink);
              most = most == NOTHING ? 0.f : most;
              float weight = exp2_of(piece_lse[i] - most), all = weight + exp2_of(sink - most);
              factor[i] *= all > 0.f ? __fdividef(weight, all) : 0.f;
              piece_lse[i] = most + log2_of(all);
#endif
            }
          }
          // Transposed, a lane holds pairs of one column's dimensions.
          const int packed = half * 8 + column, in_group = packed % GROUP, to_head = head * GROUP + in_group;
          u16* to;
          if (place.is_lone) {
            to = out + rows[half] * out_row_stride + to_head * out_head_stride;
          } else {
            int first = packed / GROUP == 0 || rows[half] < 0
                            ? place.partial
                            : __ldg(partial_indptr + item.first_row + packed / GROUP);
            to = partials + ((i64)(first + place.slot + run) * NUM_HEADS + to_head) * HEAD_DIM;
          }
#pragma unroll
          for (int step = 0; step < STEPS; step++) {
            float(&x)[4] = acc[half][step];
            u32 low = transpose(pack(x[0] * factor[0], x[1] * factor[1]));
            u32 high = transpose(pack(x[2] * factor[0], x[3] * factor[1]));
            if (rows[half] >= 0) {
              *(u32*)(to + step * 16 + pair) = low;
              *(u32*)(to + step * 16 + 8 + pair) = high;
            }
          }
          if (row_in_8 == 0) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
              int of = half * 8 + pair + i, row = item.first_row + of / GROUP, of_head = head * GROUP + of % GROUP;
              if (of >= item.num_rows * GROUP) continue;
              if (!place.is_lone) {
                int first = __ldg(partial_indptr + row);
                partial_lse[(i64)(first + place.slot + run) * NUM_HEADS + of_head] = piece_lse[i];
              } else {
#if HAS_LSE
#if HAS_ROW_MAP
                row = __ldg(row_map + row);
#endif
                lse[(i64)row * NUM_HEADS + of_head] = piece_lse[i];
#endif
              }
            }
          }
        }
      }
      token += TILE;
      if (ends) {
        token = 0;
        begins = true;
        at_item++;
        item = next;
        if (tile + 1 < num_tiles) next = read(at_item + 1);
      }
    }
  }
#if WAITS
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
