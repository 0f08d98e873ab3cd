// Attention over wide segments: the items of `segments._block_kernel`, for the tensor cores of sm_90.
//
// One block an SM takes item after item. A warpgroup of producers copies pages and queries into rings in shared memory,
// on and on over the borders of items; two warpgroups of consumers multiply. While a tile's logits are computed the
// weights of the one before meet their values. How the two work on an item:
//   - *together* where it has more than 64 packed query rows: each has 64 of them, and a tile of KV is read once for both;
//   - *side by side*, each for a KV head of its own, where it has no more;
//   - *in turns*, tile by tile, with one of them adding up what both found, where there are few items for so many SMs.
//
// Comes behind common.cuh; HEAD_DIM is 64 or 128.
//
// Source of layouts, descriptors and fragments: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate".

constexpr int TILE = 64;                        // tokens
constexpr int HALF = 64;                        // packed rows of a warpgroup
constexpr int STAGES = 5;                       // tiles in the ring
constexpr int DIM_BLOCKS = HEAD_DIM / 64;       // a row of 64 numbers is what the swizzle permutes
constexpr int BLOCK_BYTES = TILE * 128;         // 64 rows of 64 numbers
constexpr int TILE_BYTES = DIM_BLOCKS * BLOCK_BYTES;
constexpr int Q_BYTES = 2 * TILE_BYTES, RING_BYTES = STAGES * 2 * TILE_BYTES;
constexpr int OWN = HEAD_DIM / 2;               // numbers of a warpgroup's result that a thread holds
constexpr int SCRATCH_BYTES = (OWN + 4) * 128 * 4;
constexpr int ROWS_AT_ONCE = 128 / CHUNKS;      // rows that the producers copy at once
constexpr int CONSUMER_WARPS = 8;
constexpr int PAIRS = (NUM_KV_HEADS + 1) / 2;   // of heads; the last one may be one head, twice

#if T_BF16
#define TYPES "f32.bf16.bf16"
#else
#define TYPES "f32.f16.f16"
#endif

__device__ __forceinline__ void expect_arrivals(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_when_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
  u32 done = 0;
  while (!done)
    asm volatile(
        "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
}

// The lower half of what describes a matrix in shared memory, rows of 128 bytes permuted in groups of eight; the upper
// half is the same for all: 1024 bytes to the next group. `next` is the distance of the next 64 numbers of a row where
// these are the columns of the product, and ignored where they are what is summed over. 16 bytes further is one more.
__device__ __forceinline__ u32 describe(u32 address, u32 next) { return (address >> 4) + (next >> 4 << 16); }
#define DESCRIPTION(low) "{.reg .b64 b; .reg .pred p; mov.b64 b, {" low ", 0x40000040};\n"

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// What the asynchronous products write is not to be read, nor moved, before they have been awaited.
template <int N>
__device__ __forceinline__ void hold(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(x[i])::"memory");
}

// Of four lanes that hold one of four columns of a row each, every lane gets a row of its own.
__device__ __forceinline__ void transpose_4(u32 (&x)[4], int lane) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const u32 got = __shfl_xor_sync(ALL, lane & 1 ? x[i] : x[i + 1], 1);
    if (lane & 1)
      x[i] = got;
    else
      x[i + 1] = got;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 got = __shfl_xor_sync(ALL, lane & 2 ? x[i] : x[i + 2], 2);
    if (lane & 2)
      x[i] = got;
    else
      x[i + 2] = got;
  }
}

#define FLOATS_8(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), "+f"(x[i + 6]), "+f"(x[i + 7])
#define FLOATS_32(x, i) FLOATS_8(x, i), FLOATS_8(x, i + 8), FLOATS_8(x, i + 16), FLOATS_8(x, i + 24)

// 64 rows in registers times 16 x 64 in shared memory, which lie transposed: token by token if TOKENS_SUMMED.
template <int TOKENS_SUMMED>
__device__ __forceinline__ void product(float (&c)[32], const u32 (&a)[4], u32 b, bool adds) {
  asm volatile(
      DESCRIPTION("%36") "setp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16." TYPES
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, b, p, 1, 1, %38;}"
      : FLOATS_32(c, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"((int)adds), "n"(TOKENS_SUMMED));
}

template <int TOKENS_SUMMED>
__device__ __forceinline__ void product(float (&c)[64], const u32 (&a)[4], u32 b, bool adds) {
  asm volatile(
      DESCRIPTION("%68") "setp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16." TYPES
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "
      "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, b, p, 1, 1, %70;}"
      : FLOATS_32(c, 0), FLOATS_32(c, 32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"((int)adds), "n"(TOKENS_SUMMED));
}

// Where 8 numbers of a tile's row lie.
__device__ __forceinline__ u32 chunk_in_shared(int row, int chunk) {
  return chunk / 8 * BLOCK_BYTES + row * 128 + (((chunk ^ row) & 7) << 4);
}

struct Item {
  int4 a, b;
  __device__ int first_row() const { return a.x; }
  __device__ int num_rows() const { return a.y; }
  __device__ int first_page() const { return a.z; }
  __device__ int begin() const { return a.w; }
  __device__ int end() const { return b.x; }
  __device__ int seen_by_all() const { return b.y; }
  __device__ int slot() const { return b.z; }
  __device__ int kv_start() const { return b.w; }
  __device__ int num_tiles() const { return (b.x - a.w + TILE - 1) / TILE; }
};

// Items and heads of a block: to and fro, as they come the longest first, those of more than 64 rows before the others.
struct Turn {
  const int* items;
  int full, others, number, rounds;
  bool pairs;
  __device__ Turn(const int* items, int num_items, int num_full)
      : items(items), full(num_full * NUM_KV_HEADS), others(num_items - num_full), number(blockIdx.x), rounds(0) {
    // Pairs are twice as long: not where a block has one or two.
    pairs = NUM_KV_HEADS > 1 && full + others * PAIRS >= 2 * (int)gridDim.x;
    others *= heads();
  }
  __device__ int heads() const { return pairs ? PAIRS : NUM_KV_HEADS; }
  __device__ bool is_over() const { return number >= full + others; }
  __device__ int head() const {  // the first, of a pair
    return number < full ? number % NUM_KV_HEADS : (number - full) % heads() * (pairs ? 2 : 1);
  }
  __device__ Item item() const {
    Item item = {};
    if (is_over()) return item;
    const int at = number < full ? number / NUM_KV_HEADS : full / NUM_KV_HEADS + (number - full) / heads();
    const int4* from = (const int4*)(items + (i64)at * 8);
    item.a = __ldg(from), item.b = __ldg(from + 1);
    return item;
  }
  __device__ void go_on() {
    rounds++;
    number = rounds * gridDim.x + (rounds % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  }
};

// A place in a ring, and how often that was filled before: even or odd.
template <int SIZE>
struct Place {
  u32 stage = 0, turn = 0;
  __device__ void go_on() {
    if (++stage == SIZE) stage = 0, turn ^= 1;
  }
};

struct Shared {
  u32 queries, ring, scratch, has_queries, wants_queries, has_k, has_v, is_free, spare;
  __device__ Shared(u32 base)
      : queries(base), ring(base + Q_BYTES), scratch(ring + RING_BYTES), has_queries(scratch + SCRATCH_BYTES),
        wants_queries(has_queries + 16), has_k(wants_queries + 16), has_v(has_k + STAGES * 8), is_free(has_v + STAGES * 8), spare(is_free + STAGES * 8) {}
  __device__ u32 k_of(u32 stage) const { return ring + stage * 2 * TILE_BYTES; }
  __device__ u32 v_of(u32 stage) const { return k_of(stage) + TILE_BYTES; }
};

__device__ __forceinline__ void produce(Turn turn, const Shared& shared, const u16* __restrict__ q,
                                        const u16* __restrict__ k_cache, const u16* __restrict__ v_cache,
                                        const int* __restrict__ pages, const int* __restrict__ row_map,
                                        i64 q_row_stride, i64 q_head_stride) {
  const int thread = threadIdx.x % 128, lane = thread % 32;
  const int chunk = thread % CHUNKS, own_row = thread / CHUNKS;
  const u32 to_own = chunk_in_shared(own_row, chunk);  // every eighth row is permuted alike
  Place<STAGES> to;
  Place<2> to_queries;
  Item item = turn.item();
  int page_low, page_high;  // of the next tile's tokens of this lane's number, and of 32 more
  auto look = [&](const Item& of, int at) {
    const int low = at + lane, high = low + 32;
    page_low = low < of.end() ? __ldg(pages + of.first_page() + low / PAGE_SIZE) : 0;
    page_high = high < of.end() ? __ldg(pages + of.first_page() + high / PAGE_SIZE) : 0;
  };
  look(item, item.begin());
  while (!turn.is_over()) {
    const int packed_rows = item.num_rows() * GROUP;
    const bool together = packed_rows > HALF, pairs = !together && turn.pairs;
    const int head = turn.head(), second_head = pairs ? min(head + 1, NUM_KV_HEADS - 1) : head;
    turn.go_on();
    const Item next_item = turn.item();
    int rows[2][HALF / ROWS_AT_ONCE];
#pragma unroll
    for (int group = 0; group < 2; group++)
#pragma unroll
      for (int i = 0; i < HALF / ROWS_AT_ONCE; i++) {
        const int packed = group * HALF + own_row + i * ROWS_AT_ONCE;
        rows[group][i] = item.first_row() + (packed < packed_rows ? packed / GROUP : 0);
#if HAS_ROW_MAP
        if (group == 0 || together) rows[group][i] = __ldg(row_map + rows[group][i]);
#endif
      }
#pragma unroll
    for (int group = 0; group < 2; group++) {
      if (group && !together && !pairs) break;
      const int of_head = group ? second_head : head, first = together ? group * HALF + own_row : own_row;
      wait_for(shared.wants_queries + to_queries.stage * 8, to_queries.turn ^ 1);
#pragma unroll
      for (int i = 0; i < HALF / ROWS_AT_ONCE; i++) {
        const int packed = first + i * ROWS_AT_ONCE;
        const i64 row = together && group ? rows[1][i] : rows[0][i];
        const u16* from = q + row * q_row_stride + (of_head * GROUP + packed % GROUP) * q_head_stride + chunk * 8;
        copy_or_clear(shared.queries + to_queries.stage * TILE_BYTES + to_own + i * ROWS_AT_ONCE * 128, from,
                      packed < packed_rows);
      }
      arrive_when_copied(shared.has_queries + to_queries.stage * 8);
      to_queries.go_on();
    }
    for (int at = item.begin(); at < item.end(); at += TILE) {
      const int low = page_low, high = page_high, left = item.end() - at;
      if (left > TILE)
        look(item, at + TILE);
      else
        look(next_item, next_item.begin());
      i64 offset[TILE / ROWS_AT_ONCE];
#pragma unroll
      for (int i = 0; i < TILE / ROWS_AT_ONCE; i++) {
        const int row = i * ROWS_AT_ONCE + own_row;
        const int page = __shfl_sync(ALL, i * ROWS_AT_ONCE < 32 ? low : high, row % 32);
        // Items begin at multiples of TILE.
        offset[i] = (i64)page * PAGE_STRIDE + (i64)((TILE % PAGE_SIZE ? at + row : row) % PAGE_SIZE) * TOKEN_STRIDE;
      }
      for (int number = 0; number < 1 + pairs; number++) {
        const int of_head = number ? second_head : head;
        wait_for(shared.is_free + to.stage * 8, to.turn ^ 1);
        auto copy = [&](u32 to_tile, const u16* cache) {
          const u16* from = cache + (i64)of_head * HEAD_STRIDE + chunk * 8;
          if (left >= TILE) {
#pragma unroll
            for (int i = 0; i < TILE / ROWS_AT_ONCE; i++) copy_async(to_tile + i * ROWS_AT_ONCE * 128, from + offset[i]);
          } else {
#pragma unroll
            for (int i = 0; i < TILE / ROWS_AT_ONCE; i++)
              copy_or_clear(to_tile + i * ROWS_AT_ONCE * 128, from + offset[i], i * ROWS_AT_ONCE + own_row < left);
          }
        };
        copy(shared.k_of(to.stage) + to_own, k_cache);
        arrive_when_copied(shared.has_k + to.stage * 8);
        copy(shared.v_of(to.stage) + to_own, v_cache);
        arrive_when_copied(shared.has_v + to.stage * 8);
        to.go_on();
      }
    }
    item = next_item;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ void consume(Turn turn, const Shared& shared, const int* __restrict__ row_map,
                                        const int* __restrict__ row_pos, const int* __restrict__ partial_indptr,
                                        u16* __restrict__ partials, float* __restrict__ partial_lse,
                                        u16* __restrict__ out, float* __restrict__ lse,
                                        const float* __restrict__ sinks, float scale, float soft_cap, float v_scale,
                                        i64 out_row_stride, i64 out_head_stride) {
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
  const int group = threadIdx.x / 128;  // of warps: 0 or 1
  Place<STAGES> at;
  Place<2> at_queries;
  u32 turns = 0;
  int reader = -1;  // the group that read the scratch memory last
  Item item = turn.item();
  // Of a thread's two rows: the packed number, where the result goes, and how much KV each sees.
  int packed[2], place[2];
#if CAUSAL
  int visible[2];
#endif
  auto find_rows = [&](const Item& of) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      packed[i] = (of.num_rows() * GROUP > HALF ? group * HALF : 0) + warp * 16 + lane / 4 + i * 8;
      const int row = of.first_row() + packed[i] / GROUP;
      const bool is_real = packed[i] < of.num_rows() * GROUP;
      place[i] = row;
      if (of.slot() >= 0) place[i] = is_real ? __ldg(partial_indptr + row) + of.slot() : 0;
#if HAS_ROW_MAP
      if (of.slot() < 0) place[i] = is_real ? __ldg(row_map + row) : 0;
#endif
#if CAUSAL
      visible[i] = is_real ? __ldg(row_pos + row) + 1 - of.kv_start() : 0;
#endif
    }
  };
  find_rows(item);
  while (!turn.is_over()) {
    const int packed_rows = item.num_rows() * GROUP, num_tiles = item.num_tiles();
    const bool together = packed_rows > HALF, pairs = !together && turn.pairs, in_turns = !together && !pairs;
    const int head = min(turn.head() + (pairs ? group : 0), NUM_KV_HEADS - 1);
    turn.go_on();
    const Item next = turn.item();
    turns++;
#ifdef LATE  // for tests: a group that is behind the other, every other time
    if (group + 1 == LATE && turns % 2) asm volatile("nanosleep.u32 200000;");
#endif
    // Tiles in the ring, of which all, or every other, are this group's.
    const int in_ring = pairs ? 2 * num_tiles : num_tiles, step = together ? 1 : 2;
    const int first_tile = together ? 0 : in_turns ? (group + turns) & 1 : group;
    const bool is_lone = item.slot() < 0;
    u32 queries[STEPS][4];
    for (int of = 0; of < (in_turns ? 1 : 2); of++) {
      wait_for(shared.has_queries + at_queries.stage * 8, at_queries.turn);
      if (in_turns || of == group) {
        const int row = warp * 16 + lane % 16;
#pragma unroll
        for (int k = 0; k < STEPS; k++)
          load_fragment(queries[k], shared.queries + at_queries.stage * TILE_BYTES + chunk_in_shared(row, 2 * k + lane / 16));
      }
      __syncwarp();
      if (lane == 0) arrive(shared.wants_queries + at_queries.stage * 8);
      at_queries.go_on();
    }

    float acc[OWN], logits[32];
    u32 weights[4][4];
    float highest[2] = {NOTHING, NOTHING}, total[2] = {0.f, 0.f}, old[2] = {1.f, 1.f};
#pragma unroll
    for (int i = 0; i < OWN; i++) acc[i] = 0.f;
    auto free_tile = [&](const Place<STAGES>& at) {
      __syncwarp();
      if (lane == 0) arrive(shared.is_free + at.stage * 8);
    };
    auto pass = [&](const Place<STAGES>& at) {  // a tile of the other group's
      wait_for(shared.has_k + at.stage * 8, at.turn);
      free_tile(at);
    };
    auto see_copies = [&]() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); };
    auto begin_logits = [&](const Place<STAGES>& at) {
      const u32 tile = describe(shared.k_of(at.stage), 16);
      begin_products();
#pragma unroll
      for (int k = 0; k < STEPS; k++) product<0>(logits, queries[k], tile + (k / 4 * BLOCK_BYTES + k % 4 * 32) / 16, k > 0);
      commit_products();
    };
    auto begin_values = [&](const Place<STAGES>& at) {
      const u32 tile = describe(shared.v_of(at.stage), BLOCK_BYTES);
      begin_products();
#pragma unroll
      for (int k = 0; k < 4; k++) product<1>(acc, weights[k], tile + k * 2048 / 16, true);
      commit_products();
    };
    // Online softmax in base 2, in place; how the sums so far are to be scaled is in `old`.
    auto weigh = [&](int tile) {
      const int at = item.begin() + (pairs ? tile / 2 : tile) * TILE;
#if CAPPED
#pragma unroll
      for (int i = 0; i < 32; i++)
        logits[i] = soft_cap * (1.f - __fdividef(2.f, exp2_of(logits[i] * (scale * 2.f * LOG2E)) + 1.f)) * LOG2E;
      const float unit = 1.f;
#else
      const float unit = scale;
#endif
      if (at + TILE > item.seen_by_all()) {
#pragma unroll
        for (int block = 0; block < 8; block++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const int token = at + block * 8 + lane % 4 * 2 + i % 2;
            bool is_seen = token < item.end();
#if CAUSAL
            is_seen = is_seen && token < visible[i / 2];
#endif
            if (!is_seen) logits[block * 4 + i] = NOTHING;
          }
      }
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float most = NOTHING;
#pragma unroll
        for (int block = 0; block < 8; block++)
          most = fmaxf(most, fmaxf(logits[block * 4 + i * 2], logits[block * 4 + i * 2 + 1]));
        most = fmaxf(most, __shfl_xor_sync(ALL, most, 1));
        most = fmaxf(most, __shfl_xor_sync(ALL, most, 2));
        most = fmaxf(highest[i], most * unit);
        const float base = most == NOTHING ? 0.f : most;
        old[i] = exp2_of(highest[i] - base);
        highest[i] = most;
        float sum = 0.f;
#pragma unroll
        for (int block = 0; block < 8; block++)
#pragma unroll
          for (int j = 0; j < 2; j++) {
            float& x = logits[block * 4 + i * 2 + j];
            x = exp2_of(x * unit - base);
            sum += x;
          }
        total[i] = total[i] * old[i] + sum;
      }
    };
    auto pack_weights = [&]() {  // not while products read those before
#pragma unroll
      for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) weights[k][i] = pack(logits[k * 8 + i * 2], logits[k * 8 + i * 2 + 1]);
    };

    if (first_tile == 1) {
      pass(at);
      at.go_on();
    }
    if (first_tile < in_ring) {
      wait_for(shared.has_k + at.stage * 8, at.turn);
      see_copies();
      begin_logits(at);
      await_products<0>();
      hold(logits);
      weigh(first_tile);
      pack_weights();
      int tile = first_tile + step;
      for (; tile < in_ring; tile += step) {
        Place<STAGES> following = at;
        following.go_on();
        if (!together) {
          pass(following);
          following.go_on();
        }
        wait_for(shared.has_v + at.stage * 8, at.turn);
        wait_for(shared.has_k + following.stage * 8, following.turn);
        see_copies();
        begin_logits(following);
        begin_values(at);
        await_products<1>();
        hold(logits);
        weigh(tile);
        // ptxas would await the values first, were there nothing to be stored before.
        if (lane == 0)
          asm volatile("st.volatile.shared.f32 [%0], %1;" ::"r"(shared.spare + threadIdx.x / 32 * 4), "f"(total[0] + total[1]) : "memory");
        await_products<0>();
        hold(acc);
        free_tile(at);
        if (__any_sync(ALL, old[0] != 1.f || old[1] != 1.f)) {
#pragma unroll
          for (int i = 0; i < OWN; i++) acc[i] *= old[i / 2 % 2];
        }
        pack_weights();
        at = following;
      }
      wait_for(shared.has_v + at.stage * 8, at.turn);
      see_copies();
      begin_values(at);
      await_products<0>();
      hold(acc);
      free_tile(at);
      at.go_on();
      if (!together && tile - 1 < in_ring) {
        pass(at);
        at.go_on();
      }
    }

    bool writes = true;
    if (in_turns) {
      const int finisher = turns & 1;  // the group with the first tile
      writes = group == finisher;
      if (num_tiles > 1) {
        // Barriers 1 and 3: the other group's is in the scratch memory; one for each finisher, lest a group that arrives for
        // the other, and is next itself, be taken for both. Barrier 2: what was there has been read, of which a group that
        // read it itself need not be told.
        const u32 own = shared.scratch + thread * 4, is_there = finisher ? 3 : 1;
        if (!writes) {
          if (reader == finisher) asm volatile("bar.sync 2, 256;" ::: "memory");
#pragma unroll
          for (int i = 0; i < OWN; i++) asm volatile("st.shared.f32 [%0], %1;" ::"r"(own + i * 512), "f"(acc[i]) : "memory");
#pragma unroll
          for (int i = 0; i < 2; i++) {
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(own + (OWN + i) * 512), "f"(highest[i]) : "memory");
            asm volatile("st.shared.f32 [%0], %1;" ::"r"(own + (OWN + 2 + i) * 512), "f"(total[i]) : "memory");
          }
          asm volatile("bar.arrive %0, 256;" ::"r"(is_there) : "memory");
        } else {
          if (reader == finisher) asm volatile("bar.arrive 2, 256;" ::: "memory");
          asm volatile("bar.sync %0, 256;" ::"r"(is_there) : "memory");
          float weight[2];
#pragma unroll
          for (int i = 0; i < 2; i++) {
            float other, other_total;
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(other) : "r"(own + (OWN + i) * 512) : "memory");
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(other_total) : "r"(own + (OWN + 2 + i) * 512) : "memory");
            const float most = fmaxf(highest[i], other), base = most == NOTHING ? 0.f : most;
            old[i] = exp2_of(highest[i] - base), weight[i] = exp2_of(other - base);
            total[i] = total[i] * old[i] + other_total * weight[i];
            highest[i] = most;
          }
#pragma unroll
          for (int i = 0; i < OWN; i++) {
            float x;
            asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(own + i * 512) : "memory");
            acc[i] = acc[i] * old[i / 2 % 2] + x * weight[i / 2 % 2];
          }
        }
        reader = finisher;
      }
    }
    const int of_row[2] = {packed[0], packed[1]}, to_place[2] = {place[0], place[1]};
    find_rows(next);
    if (writes) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float sum = total[i] + __shfl_xor_sync(ALL, total[i], 1);
        sum += __shfl_xor_sync(ALL, sum, 2);
        float piece_lse = sum > 0.f ? highest[i] + log2_of(sum) : NOTHING;
        float factor = sum > 0.f ? __fdividef(1.f, sum) : sum;  // NaN remains
        const int to_head = head * GROUP + of_row[i] % GROUP;
        const bool is_real = of_row[i] < packed_rows;
        if (is_lone) {
          factor *= v_scale;
#if HAS_SINKS
          const float sink = __ldg(sinks + to_head) * LOG2E;
          float most = fmaxf(piece_lse, sink);
          most = most == NOTHING ? 0.f : most;
          const float weight = exp2_of(piece_lse - most), all = weight + exp2_of(sink - most);
          factor *= all > 0.f ? __fdividef(weight, all) : 0.f;
          piece_lse = most + log2_of(all);
#endif
        }
        const i64 piece = (i64)to_place[i] * NUM_HEADS + to_head;
        u16* to = is_lone ? out + to_place[i] * out_row_stride + to_head * out_head_stride : partials + piece * HEAD_DIM;
#pragma unroll
        for (int block = 0; block < CHUNKS; block += 4) {
          u32 x[4];
#pragma unroll
          for (int k = 0; k < 4; k++) {
            const int at = (block + k) * 4 + i * 2;
            x[k] = pack(acc[at] * factor, acc[at + 1] * factor);
          }
          transpose_4(x, lane);
          if (is_real) *(uint4*)(to + (block + lane % 4) * 8) = make_uint4(x[0], x[1], x[2], x[3]);
        }
        if (is_real) {
          if (lane % 4 == 0) {
            if (!is_lone) partial_lse[piece] = piece_lse;
#if HAS_LSE
            if (is_lone) lse[piece] = piece_lse;
#endif
          }
        }
      }
    }
    item = next;
  }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    wide(const u16* __restrict__ q, const u16* __restrict__ k_cache, const u16* __restrict__ v_cache,
         const int* __restrict__ items, const int* __restrict__ counts, const int* __restrict__ pages,
         const int* __restrict__ row_map, const int* __restrict__ row_pos, const int* __restrict__ partial_indptr,
         u16* __restrict__ partials, float* __restrict__ partial_lse, u16* __restrict__ out, float* __restrict__ lse,
         const float* __restrict__ sinks, float scale, float soft_cap, float v_scale, i64 q_row_stride,
         i64 q_head_stride, i64 out_row_stride, i64 out_head_stride, int num_items, int num_full) {
#if FIRST
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#if TRIGGERS
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  extern __shared__ __align__(1024) unsigned char memory[];
  const Shared shared((u32)__cvta_generic_to_shared(memory));
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < 2; stage++) {
      expect_arrivals(shared.has_queries + stage * 8, 128);
      expect_arrivals(shared.wants_queries + stage * 8, CONSUMER_WARPS);
    }
    for (int stage = 0; stage < STAGES; stage++) {
      expect_arrivals(shared.has_k + stage * 8, 128);
      expect_arrivals(shared.has_v + stage * 8, 128);
      expect_arrivals(shared.is_free + stage * 8, CONSUMER_WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  const Turn turn(items, counts ? __ldg(counts) : num_items, counts ? __ldg(counts + 1) : num_full);
  if (threadIdx.x >= 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 104;");
    produce(turn, shared, q, k_cache, v_cache, pages, row_map, q_row_stride, q_head_stride);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 200;");
    consume(turn, shared, row_map, row_pos, partial_indptr, partials, partial_lse, out, lse, sinks, scale, soft_cap,
            v_scale, out_row_stride, out_head_stride);
  }
#if WAITS
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
