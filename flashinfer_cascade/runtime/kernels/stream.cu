// Attention over narrow segments: the stream of `segments._stream_kernel`, for tensor cores from sm_80 on.
//
// Every warp works on a run of its own and waits for no other. Its lanes hold the fields of the next items and the pages
// of the next tiles, so that nothing but copies into its ring in shared memory goes through the memory system, some
// tiles ahead: a tile of KV, and with an item's first tile its queries. Tokens lie along the rows of the matrix instructions and the packed query heads along the columns
// (S^T = K Q^T, O^T = V^T P^T), so that eight columns are enough where Triton's kernel pads to sixteen rows.
//
// Comes behind common.cuh. The caller defines what that takes, COLUMNS (8 or 16: packed query heads), TILE (KV tokens, a
// multiple of 16), STAGES and WARPS.
//
// Source of the fragments' layouts: PTX ISA, "Matrix fragments for mma.m16n8k16" and "ldmatrix".

constexpr int BLOCKS = TILE / 16;        // of tokens
constexpr int HALVES = COLUMNS / 8;      // of columns
constexpr int TILE_BYTES = TILE * HEAD_DIM * 2;
constexpr int STAGE_BYTES = 2 * TILE_BYTES + COLUMNS * HEAD_DIM * 2;  // K, V and queries
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

// What an earlier kernel wrote, which may not have ended when this one began: never from L1.
__device__ __forceinline__ u32 read_late(const void* from) {
  u32 x;
  asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(x) : "l"(from));
  return x;
}

__device__ __forceinline__ float unpack(u32 x, int i) {  // the lower or the upper of two
#if T_BF16
  return __uint_as_float(i ? x & 0xffff0000u : x << 16);
#else
  float y;
  asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(y) : "r"(i ? x >> 16 : x));
  return y;
#endif
}

__device__ __forceinline__ float across_rows(float x, bool is_sum) {
#pragma unroll
  for (int lanes = 4; lanes < 32; lanes *= 2) {
    float other = __shfl_xor_sync(0xffffffffu, x, lanes);
    x = is_sum ? x + other : fmaxf(x, other);
  }
  return x;
}

// Copies go row by row, one row of HEAD_DIM numbers for each group of CHUNKS lanes; in shared memory a row's chunks are
// permuted, so that the same chunk of eight rows lies in different banks.
constexpr int ROW_LANES = CHUNKS < 32 ? CHUNKS : 32, ROWS_AT_ONCE = 32 / ROW_LANES, ROW_BYTES = HEAD_DIM * 2;
constexpr bool TILE_IN_PAGE = PAGE_SIZE % TILE == 0;

__device__ __forceinline__ u32 row_in_shared(int row, int lane) {  // a constant row, a multiple of ROWS_AT_ONCE
  const int lane_row = lane / ROW_LANES, chunk = lane % ROW_LANES;
  return row * ROW_BYTES + lane_row * ROW_BYTES + (((chunk ^ lane_row) ^ (row & 7)) << 4);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    stream(const u16* __restrict__ q, const u16* __restrict__ k_cache, const u16* __restrict__ v_cache,
           const int* __restrict__ items, const int* __restrict__ runs, const int* __restrict__ pages,
           const int* __restrict__ row_map, const int* __restrict__ row_pos, const int* __restrict__ partial_indptr,
           u16* __restrict__ partials, float* __restrict__ partial_lse, u16* __restrict__ out, float* __restrict__ lse,
           const float* __restrict__ sinks, float scale, float soft_cap, float v_scale, i64 q_row_stride,
           i64 q_head_stride, i64 out_row_stride, i64 out_head_stride, int num_runs) {
#if FIRST
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#if TRIGGERS
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int number = blockIdx.x * WARPS + warp;
  const int head = number % NUM_KV_HEADS, run = number / NUM_KV_HEADS;
  const int* record = runs + run * 8;
  const int num_tiles = run < num_runs ? __ldg(record + 4) : 0;
  const u32 ring = (u32)__cvta_generic_to_shared(memory) + warp * STAGES * STAGE_BYTES;
  const u16* k_head = k_cache + (i64)head * HEAD_STRIDE;
  const u16* v_head = v_cache + (i64)head * HEAD_STRIDE;
  const u16* q_head = q + (i64)head * GROUP * q_head_stride;
  const int row_in_8 = lane / 4, pair = lane % 4 * 2;  // of a fragment
  const int column = row_in_8;  // of a transposed fragment: packed query head, and 8 more in the second half
  int first_item = num_tiles > 0 ? __ldg(record + 3) : 0, token = num_tiles > 0 ? __ldg(record + 5) : 0;
  int tiles_left = num_tiles;
  while (tiles_left > 0) {
    // A window of as many items as there are lanes. The list ends with zeros, a window long.
    const int4 fields = __ldg((const int4*)items + 2 * (first_item + lane));
    const int4 places = __ldg((const int4*)items + 2 * (first_item + lane) + 1);
    const int item_row = fields.x, item_rows = fields.y, item_page = fields.z, item_tokens = fields.w;
#if HAS_ROW_MAP
    const int item_q_row = item_rows > 0 ? __ldg(row_map + item_row) : 0;
#else
    const int item_q_row = item_row;
#endif
    // Tiles of the window's items before and up to each, from the run's first tile on.
    int until = (item_tokens + TILE - 1) / TILE - (lane == 0 ? token / TILE : 0);
    const int own_tiles = until;
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      int before = __shfl_up_sync(ALL, until, lanes);
      if (lane >= lanes) until += before;
    }
    const int window_tiles = min(tiles_left, __shfl_sync(ALL, until, 31));
    const int start = until - own_tiles;  // tile at which each item begins
    const int first_token = token;
    int num_copied = 0;

    // What is copied: a lane knows every 32nd tile, of these 32 and of the next: its page (or where its page ids begin),
    // its token in the page, its number of tokens, its item, and whether it is the first of that.
    int tile_page, tile_token, tile_info, next_page, next_token, next_info;
    auto look = [&](int tile, int& page, int& in_page, int& info) {
      int low = 0;  // the last item that begins at or before the tile
#pragma unroll
      for (int step = 16; step > 0; step /= 2)
        if (__shfl_sync(ALL, start, low + step) <= tile) low += step;
      const int in_item = tile - __shfl_sync(ALL, start, low);
      const int at = in_item * TILE + (low == 0 ? first_token : 0);
      const int length = __shfl_sync(ALL, item_tokens, low);
      page = __shfl_sync(ALL, item_page, low) + at / PAGE_SIZE;
      if (TILE_IN_PAGE) page = tile < window_tiles ? __ldg(pages + page) : 0;
      in_page = at % PAGE_SIZE;
      info = max(0, min(length - at, TILE)) | low << 8 | (in_item == 0) << 16;
    };
    look(lane, tile_page, tile_token, tile_info);
    look(lane + 32, next_page, next_token, next_info);
    i64 row_offset = 0;  // where tiles do not lie in pages: of the token of this number in the next tile
    auto read_offset = [&](int tile) {
      const bool is_next = tile / 32 > (num_copied > 0 ? (num_copied - 1) / 32 : 0);
      const int from = __shfl_sync(ALL, is_next ? next_page : tile_page, tile % 32);
      const int token = __shfl_sync(ALL, is_next ? next_token : tile_token, tile % 32) + lane;
      const int valid = __shfl_sync(ALL, is_next ? next_info : tile_info, tile % 32) & 255;
      const int id = tile < window_tiles && lane < valid ? __ldg(pages + from + token / PAGE_SIZE) : 0;
      row_offset = (i64)id * PAGE_STRIDE + (i64)(token % PAGE_SIZE) * TOKEN_STRIDE;
    };
    if (!TILE_IN_PAGE) read_offset(0);
    auto copy_next = [&]() {
      if (num_copied < window_tiles) {
        if (num_copied > 0 && num_copied % 32 == 0) {
          tile_page = next_page, tile_token = next_token, tile_info = next_info;
          look(num_copied + 32 + lane, next_page, next_token, next_info);
        }
        const u32 stage = ring + num_copied % STAGES * STAGE_BYTES;
        const int info = __shfl_sync(ALL, tile_info, num_copied % 32), valid = info & 255;
        const int lane_row = lane / ROW_LANES;
        const i64 at_lane = (i64)lane_row * TOKEN_STRIDE + lane % ROW_LANES * 8;
        num_copied++;
        if (TILE_IN_PAGE) {
          const int page = __shfl_sync(ALL, tile_page, (num_copied - 1) % 32);
          const int token = __shfl_sync(ALL, tile_token, (num_copied - 1) % 32);
          const i64 at = (i64)page * PAGE_STRIDE + (i64)token * TOKEN_STRIDE + at_lane;
          const u16 *k = k_head + at, *v = v_head + at;
          if (valid == TILE) {
#pragma unroll
            for (int row = 0; row < TILE; row += ROWS_AT_ONCE) copy_async(stage + row_in_shared(row, lane), k + (i64)row * TOKEN_STRIDE);
#pragma unroll
            for (int row = 0; row < TILE; row += ROWS_AT_ONCE)
              copy_async(stage + TILE_BYTES + row_in_shared(row, lane), v + (i64)row * TOKEN_STRIDE);
          } else {
#pragma unroll
            for (int row = 0; row < TILE; row += ROWS_AT_ONCE) {
              const bool is_real = row + lane_row < valid;
              copy_or_clear(stage + row_in_shared(row, lane), k + (i64)row * TOKEN_STRIDE, is_real);
              copy_or_clear(stage + TILE_BYTES + row_in_shared(row, lane), v + (i64)row * TOKEN_STRIDE, is_real);
            }
          }
        } else {
#pragma unroll
          for (int row = 0; row < TILE; row += ROWS_AT_ONCE) {
            const bool is_real = row + lane_row < valid;
            const i64 at = __shfl_sync(ALL, row_offset, row + lane_row) + lane % ROW_LANES * 8;
            copy_or_clear(stage + row_in_shared(row, lane), k_head + at, is_real);
            copy_or_clear(stage + TILE_BYTES + row_in_shared(row, lane), v_head + at, is_real);
          }
          read_offset(num_copied);
        }
        if (info >> 16 || num_copied == 1) {
          const int in_item = info >> 8 & 255;
          const int row_0 = __shfl_sync(ALL, item_row, in_item), q_row_0 = __shfl_sync(ALL, item_q_row, in_item);
          const int packed_rows = __shfl_sync(ALL, item_rows, in_item) * GROUP;
#pragma unroll
          for (int first = 0; first < COLUMNS; first += ROWS_AT_ONCE) {
            const int packed = first + lane_row;
            i64 row = q_row_0;
            if (packed >= GROUP && packed < packed_rows) {
#if HAS_ROW_MAP
              row = __ldg(row_map + row_0 + packed / GROUP);
#else
              row = row_0 + packed / GROUP;
#endif
            }
            const u16* from = q_head + row * q_row_stride + packed % GROUP * q_head_stride + lane % ROW_LANES * 8;
            copy_or_clear(stage + 2 * TILE_BYTES + row_in_shared(first, lane), from, packed < packed_rows);
          }
        }
      }
      asm volatile("cp.async.commit_group;");
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) copy_next();

    u32 queries[HALVES][STEPS][2];
    float acc[HALVES][STEPS][4];
    float highest[HALVES][2], total[HALVES][2];
#if CAUSAL
    int visible[HALVES][2];
#endif
    // Merge pieces that earlier kernels wrote into a transposed result, all of one row, and its lse.
    auto finish = [&](u32(&result)[STEPS][2], float(&own_lse)[2], i64 first, int count, int of_head, bool is_real) {
#if WAITS
      asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
      const float low = __shfl_sync(ALL, own_lse[0], column / 2), high = __shfl_sync(ALL, own_lse[1], column / 2);
      float most = column % 2 ? high : low;
      float sum = most == NOTHING ? 0.f : 1.f;
      float values[STEPS][2][2];
#pragma unroll
      for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int k = 0; k < 2; k++)
#pragma unroll
          for (int i = 0; i < 2; i++) values[step][k][i] = unpack(result[step][k], i);
      for (int piece = 0; piece < count; piece++) {
        const i64 at = (first + piece) * NUM_HEADS + of_head;
        const u16* from = partials + at * HEAD_DIM + pair;
        u32 x[STEPS][2];
        const float here = is_real ? __uint_as_float(read_late(partial_lse + at)) : NOTHING;
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
          for (int k = 0; k < 2; k++) x[step][k] = is_real ? read_late(from + step * 16 + k * 8) : 0u;
        const float before = most;
        most = fmaxf(most, here);
        const float base = most == NOTHING ? 0.f : most;
        const float old = exp2_of(before - base), weight = exp2_of(here - base);
        sum = sum * old + weight;
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
          for (int k = 0; k < 2; k++)
#pragma unroll
            for (int i = 0; i < 2; i++) values[step][k][i] = values[step][k][i] * old + unpack(x[step][k], i) * weight;
      }
      float all = sum;
#if HAS_SINKS
      const float sink = __ldg(sinks + of_head) * LOG2E, before = most;
      most = fmaxf(most, sink);
      const float base = most == NOTHING ? 0.f : most, old = exp2_of(before - base);
      all = sum * old + exp2_of(sink - base);
      const float factor = all > 0.f ? v_scale * old / all : all;
#else
      const float factor = all > 0.f ? v_scale / all : all;
#endif
#pragma unroll
      for (int step = 0; step < STEPS; step++)
#pragma unroll
        for (int k = 0; k < 2; k++) result[step][k] = pack(values[step][k][0] * factor, values[step][k][1] * factor);
      const float merged = all > 0.f ? most + log2_of(all) : NOTHING;
#pragma unroll
      for (int i = 0; i < 2; i++) own_lse[i] = __shfl_sync(ALL, merged, (pair + i) * 4);
    };
    int at_item = 0, num_tokens = 0, packed_rows = 0, first_row = 0;
    bool begins = true;
    for (int tile = 0; tile < window_tiles; tile++) {
      asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2));
      __syncwarp();
      copy_next();  // into the stage of the tile before
      const u32 k_tile = ring + tile % STAGES * STAGE_BYTES, v_tile = k_tile + TILE_BYTES;
      if (begins) {
        begins = false;
        num_tokens = __shfl_sync(ALL, item_tokens, at_item);
        packed_rows = __shfl_sync(ALL, item_rows, at_item) * GROUP;
        first_row = __shfl_sync(ALL, item_row, at_item);
#if CAUSAL
        const int kv_start = __shfl_sync(ALL, places.w, at_item);
#endif
        const u32 q_tile = k_tile + 2 * TILE_BYTES;
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
#pragma unroll
          for (int step = 0; step < STEPS; step += 2) {
            u32 b[4];
            const int row = half * 8 + lane % 8, chunk = step * 2 + lane / 8;
            load_fragment(b, q_tile + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4));
            queries[half][step][0] = b[0], queries[half][step][1] = b[1];
            queries[half][step + 1][0] = b[2], queries[half][step + 1][1] = b[3];
          }
#pragma unroll
          for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[half][step][i] = 0.f;
          highest[half][0] = highest[half][1] = NOTHING;
          total[half][0] = total[half][1] = 0.f;
#if CAUSAL
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const int packed = half * 8 + pair + i;
            const int sees = packed < packed_rows ? __ldg(row_pos + first_row + packed / GROUP) + 1 - kv_start : 0;
            visible[half][i] = min(sees, num_tokens);
          }
#endif
        }
      }
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
          load_fragment(a, k_tile + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4));
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
      if (token + TILE > num_tokens)
#endif
      {
#pragma unroll
        for (int block = 0; block < BLOCKS; block++)
#pragma unroll
          for (int half = 0; half < HALVES; half++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
              const int at = token + block * 16 + row_in_8 + i / 2 * 8;
#if CAUSAL
              bool is_seen = at < visible[half][i % 2];
#else
              bool is_seen = at < num_tokens;
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
          load_transposed(a, v_tile + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4));
#pragma unroll
          for (int half = 0; half < HALVES; half++)
            multiply(acc[half][step], a, weights[block][half][0], weights[block][half][1]);
        }

      const bool ends = token + TILE >= num_tokens;
      if (ends || (tile + 1 == window_tiles && tile + 1 == tiles_left)) {
        // Pieces of its row that earlier kernels wrote, if they are to be merged with this one, the last.
        const int partial = __shfl_sync(ALL, places.x, at_item), above = __shfl_sync(ALL, places.y, at_item) - 1;
        const bool is_lone = above == 0, finishes = above >= 0;
        const int slot = __shfl_sync(ALL, places.z, at_item) + run, q_row_0 = __shfl_sync(ALL, item_q_row, at_item);
        // Where the piece or result of a packed query head lies, in rows of heads.
        auto place_of = [&](int packed) -> int {
          const int row = first_row + packed / GROUP;
          if (!finishes) return (packed < GROUP ? partial : __ldg(partial_indptr + row)) + slot;
          if (packed < GROUP) return q_row_0;
#if HAS_ROW_MAP
          return __ldg(row_map + row);
#else
          return row;
#endif
        };
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
          if (half * 8 >= packed_rows) break;
          float factor[2], piece_lse[2];
#pragma unroll
          for (int i = 0; i < 2; i++) {
            const float sum = across_rows(total[half][i], true);
            piece_lse[i] = sum > 0.f ? highest[half][i] + log2_of(sum) : NOTHING;
            factor[i] = sum > 0.f ? __fdividef(1.f, sum) : sum;  // NaN remains
            if (is_lone) {
              factor[i] *= v_scale;
#if HAS_SINKS
              const int in_group = (half * 8 + pair + i) % GROUP;
              const float sink = __ldg(sinks + head * GROUP + in_group) * LOG2E;
              float most = fmaxf(piece_lse[i], sink);
              most = most == NOTHING ? 0.f : most;
              const float weight = exp2_of(piece_lse[i] - most), all = weight + exp2_of(sink - most);
              factor[i] *= all > 0.f ? __fdividef(weight, all) : 0.f;
              piece_lse[i] = most + log2_of(all);
#endif
            }
          }
          // Transposed, a lane holds pairs of one column's dimensions.
          const int packed = half * 8 + column, to_head = head * GROUP + packed % GROUP;
          const bool is_real = packed < packed_rows;
          const i64 place = is_real ? place_of(packed) : 0;
          u16* to = finishes ? out + place * out_row_stride + to_head * out_head_stride
                             : partials + (place * NUM_HEADS + to_head) * HEAD_DIM;
          u32 result[STEPS][2];
#pragma unroll
          for (int step = 0; step < STEPS; step++) {
            float(&x)[4] = acc[half][step];
            result[step][0] = transpose(pack(x[0] * factor[0], x[1] * factor[1]));
            result[step][1] = transpose(pack(x[2] * factor[0], x[3] * factor[1]));
          }
          if (above > 0) finish(result, piece_lse, (i64)partial, above, to_head, is_real);
          if (is_real) {
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
              *(u32*)(to + step * 16 + pair) = result[step][0];
              *(u32*)(to + step * 16 + 8 + pair) = result[step][1];
            }
          }
          if (row_in_8 == 0) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
              const int of = half * 8 + pair + i, of_head = head * GROUP + of % GROUP;
              if (of >= packed_rows) continue;
              if (!finishes) partial_lse[(i64)place_of(of) * NUM_HEADS + of_head] = piece_lse[i];
#if HAS_LSE
              if (finishes) lse[(i64)place_of(of) * NUM_HEADS + of_head] = piece_lse[i];
#endif
            }
          }
        }
      }
      token += TILE;
      if (ends) {
        token = 0;
        begins = true;
        at_item++;
      }
    }
    tiles_left -= window_tiles;
    first_item += at_item;
  }
#if WAITS
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
