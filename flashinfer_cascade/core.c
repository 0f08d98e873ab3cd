/* The planner's loops over requests and nodes, in C: an optional double of what the Python modules define.
 *
 * Every function computes what Python computes, bit for bit: integers, and doubles in the same order of operations
 * (compile with -ffp-contract=off). There is no state here and nothing is kept: all memory but scratch is the caller's.
 * native.py builds the arguments and says which Python function each of these stands for.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef int64_t i64;

/* The digest of this file that the build was made from: native.py refuses to load one of another file. */
const char *fic_source(void) { return FIC_SOURCE; }

enum { NUM_TILES = 3, MAX_LEVELS = 64, MAX_CANDIDATES = 4, NUM_WEIGHTS = 2 };
enum { FA2, FA2_UNCUT, FA3, DECODE, SEGMENTS };  /* native.BACKENDS */
enum { FOUND, NOTHING_PAYS, TOO_DEEP, NO_MEMORY }; /* native.Status */

/* cost.CostModel and the policy; native.Model. */
typedef struct {
    double hbm_us_per_token, launch_us, split_us, split_row_ns, merge_us, merge_row_ns, row_heads;
    double decode_block_us, decode_token_us, decode_launch_us, decode_lone_block;
    double fa3_block_us, fa3_token_us;
    double decode_block_ps, decode_token_ps;
    double segment_partial_ps, segment_launch_us;
    double segment_item_ps[2], segment_token_ps[2], segment_lone_block[2]; /* of a narrow and of a wide tile */
    double block_us[NUM_TILES], token_us[NUM_TILES], lone_block[NUM_TILES];
    double block_ps[NUM_TILES], token_ps[NUM_TILES];
    double level_weights[NUM_WEIGHTS];
    i64 tiles[NUM_TILES], tile_shift[NUM_TILES]; /* query rows of a block, and their binary logarithms */
    i64 num_sms, num_qo_heads, num_kv_heads, group_size, small_head, page_size, window_left;
    i64 blocks_per_sm, min_split_tokens, fa3_min_rows, decode_blocks_per_sm;
    i64 has_fa3, has_decode, decode_group, fold, forced, max_levels;
    i64 narrow_rows, rows_per_tile, rates_levels, rates_segments;
    i64 segment_blocks_per_sm[2], segment_min_tokens[2];
} model;

/* A forest in one block: forest.PrefixForest.block. */
typedef struct {
    i64 n, nodes;
    const i64 *order, *tail_node, *tail_begin;
    const i64 *parent, *depth, *begin, *end, *page_begin, *num_pages, *first_page;
} forest;

/* batch.Batch.block. */
typedef struct {
    const i64 *page_begin, *page_counts, *seq_lens, *qo_lens;
} batch;

/* What is found, besides the arrays: the head of the output of fic_rate, HEAD numbers long. */
typedef struct {
    double flat_us, us;
    i64 flat_backend, num_levels, tokens_left, backends[MAX_LEVELS];
} found;

enum { HEAD = sizeof(found) / sizeof(i64) }; /* native.HEAD */

/* fold.Cut */
typedef struct {
    uint8_t *kept;
    i64 *node_start, *node_level, *node_above, *tail_start, *tail_above;
    i64 num_levels;
} cut;

static i64 max_of(i64 a, i64 b) { return a > b ? a : b; }
static i64 min_of(i64 a, i64 b) { return a < b ? a : b; }
static i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }
static i64 tiles_of(const model *m, i64 packed_rows, int tile) {
    return (packed_rows + m->tiles[tile] - 1) >> m->tile_shift[tile];
}

static forest forest_of(const i64 *block, i64 n, i64 nodes) {
    const i64 *node = block + 3 * n;
    forest f = {n, nodes, block, block + n, block + 2 * n, node, node + nodes, node + 2 * nodes, node + 3 * nodes,
                node + 4 * nodes, node + 5 * nodes, node + 6 * nodes};
    return f;
}

static batch batch_of(const i64 *block, i64 n) {
    batch b = {block, block + n, block + 2 * n, block + 3 * n};
    return b;
}

/* cost.round_tokens */
static i64 round_tokens(i64 tokens) {
    int shift = 4; /* steps of 2 ** (exponent - 3), where 2 ** exponent is the next power of two */
    while ((tokens - 1) >> (shift + 3) > 0) shift++;
    return ((tokens + ((i64)1 << shift) - 1) >> shift) << shift;
}

/* cost._longer */
static double longer(double a, double b) {
    a = a * a;
    b = b * b;
    return sqrt(sqrt(a * a + b * b));
}

typedef struct {
    const i64 *rows, *tokens;
    i64 n, hbm_tokens, num_rows, longest;
} launch;

/* CostModel._fa2 and _blocks */
static double fa2_us(const model *m, const launch *l, int may_cut, int *is_cut) {
    i64 average = l->num_rows * m->group_size / l->n;
    int tile = average > m->tiles[1] && m->small_head ? 2 : average > m->tiles[0] ? 1 : 0;
    i64 page = m->page_size, heads = m->num_kv_heads;
    i64 num_tiles = 0, dot = 0;
    for (i64 i = 0; i < l->n; i++) {
        i64 tiles = tiles_of(m, l->rows[i] * m->group_size, tile);
        num_tiles += tiles;
        dot += tiles * l->tokens[i];
    }
    i64 budget = m->blocks_per_sm * m->num_sms / heads;
    i64 most = max_of(ceil_div(l->longest, page), 1), low = max_of(m->min_split_tokens / page, 1);
    i64 blocks = num_tiles * heads, longest = l->longest;
    *is_cut = 0;
    if (may_cut && num_tiles <= budget && low < most) {
        i64 high = most, sum;
        for (;;) {
            i64 middle = low < high ? (low + high) / 2 : low;
            sum = 0;
            for (i64 i = 0; i < l->n; i++) {
                i64 pages = max_of(ceil_div(l->tokens[i], page), 1);
                sum += tiles_of(m, l->rows[i] * m->group_size, tile) * ceil_div(pages, middle);
            }
            if (low >= high) break;
            if (sum > budget) low = middle + 1;
            else high = middle;
        }
        blocks = sum * heads;
        longest = min_of(low * page, longest);
        *is_cut = low < most;
    }
    i64 tokens = dot * heads;
    double busy = ((double)blocks * m->block_us[tile] + (double)tokens * m->token_us[tile]) / (double)m->num_sms;
    double mean = (double)tokens / (double)blocks;
    i64 waves = ceil_div(blocks, m->blocks_per_sm * m->num_sms);
    double alone = (mean * (double)waves + (double)longest - mean) * m->token_us[tile] * m->lone_block[tile];
    double us = m->launch_us + longer(busy > alone ? busy : alone, (double)l->hbm_tokens * m->hbm_us_per_token);
    if (*is_cut) us += m->split_us + (double)l->num_rows * m->row_heads * m->split_row_ns * 1e-3;
    return us;
}

/* CostModel.decode_us */
static double decode_us(const model *m, const launch *l) {
    i64 blocks = l->n * m->num_kv_heads, tokens = 0;
    if (!m->has_decode) return INFINITY;
    if (l->longest > m->min_split_tokens && blocks < m->decode_blocks_per_sm * m->num_sms) return INFINITY;
    for (i64 i = 0; i < l->n; i++) tokens += l->tokens[i];
    tokens *= m->num_kv_heads;
    double busy = ((double)blocks * m->decode_block_us + (double)tokens * m->decode_token_us) / (double)m->num_sms;
    double alone = (double)l->longest * m->decode_token_us * m->decode_lone_block;
    return m->decode_launch_us + longer(busy > alone ? busy : alone, (double)l->hbm_tokens * m->hbm_us_per_token);
}

/* CostModel.fa3_us */
static double fa3_us(const model *m, const launch *l) {
    if (!m->has_fa3) return INFINITY;
    i64 blocks = 0, dot = 0;
    for (i64 i = 0; i < l->n; i++) {
        i64 tiles = tiles_of(m, l->rows[i], 2);
        blocks += tiles;
        dot += tiles * l->tokens[i];
    }
    blocks *= m->num_qo_heads;
    double mean = (double)(dot * m->num_qo_heads) / (double)blocks;
    i64 waves = ceil_div(blocks, m->num_sms);
    double busy = (double)waves * m->fa3_block_us +
                  (mean * (double)waves + (double)l->longest - mean) * m->fa3_token_us;
    return m->launch_us + longer(busy, (double)l->hbm_tokens * m->hbm_us_per_token);
}

/* CostModel.best_launch */
static double best_launch(const model *m, launch *l, i64 *backend) {
    l->num_rows = l->longest = 0;
    for (i64 i = 0; i < l->n; i++) {
        l->num_rows += l->rows[i];
        l->longest = max_of(l->longest, l->tokens[i]);
    }
    int is_cut, again;
    double us = fa2_us(m, l, 1, &is_cut), other;
    *backend = is_cut ? FA2 : FA2_UNCUT;
    if (is_cut && (other = fa2_us(m, l, 0, &again)) < us) us = other, *backend = FA2_UNCUT;
    if (l->num_rows == l->n && (other = decode_us(m, l)) < us) us = other, *backend = DECODE;
    if (l->num_rows >= m->fa3_min_rows * l->n && (other = fa3_us(m, l)) < us) us = other, *backend = FA3;
    return us;
}

/* fold.cut_at */
static void cut_at(const forest *f, cut *c) {
    i64 deepest = -1;
    for (i64 v = 0; v < f->nodes; v++) {
        i64 p = f->parent[v], start = 0, level = 0, above = -1;
        if (p >= 0 && c->kept[p]) start = f->page_begin[p] + f->num_pages[p], level = c->node_level[p] + 1, above = p;
        else if (p >= 0) start = c->node_start[p], level = c->node_level[p], above = c->node_above[p];
        c->node_start[v] = start, c->node_level[v] = level, c->node_above[v] = above;
        if (c->kept[v]) deepest = max_of(deepest, level);
    }
    c->num_levels = deepest + 2;
    for (i64 i = 0; i < f->n; i++) {
        i64 v = f->tail_node[i];
        int kept = v >= 0 && c->kept[v];
        c->tail_start[i] = v < 0 ? 0 : kept ? f->page_begin[v] + f->num_pages[v] : c->node_start[v];
        c->tail_above[i] = v < 0 ? -1 : kept ? v : c->node_above[v];
    }
}

/* CostModel.levels: rows and tokens are scratch of f->n entries, node_at too. */
static double levels_us(const model *m, const forest *f, const cut *c, const i64 *part_rows, const i64 *row_indptr,
                        const i64 *context, i64 unique, i64 *rows, i64 *tokens, i64 *node_at, i64 *backends) {
    double us = 0.0;
    i64 page = m->page_size;
    for (i64 level = 0; level < c->num_levels - 1; level++) {
        memset(node_at, -1, (size_t)f->n * sizeof(i64));
        for (i64 v = 0; v < f->nodes; v++)
            if (c->kept[v] && c->node_level[v] == level) node_at[f->begin[v]] = v;
        launch l = {rows, tokens, 0, 0, 0, 0};
        for (i64 i = 0; i < f->n;) {
            i64 v = node_at[i], end = i + 1;
            tokens[l.n] = 0;
            if (v >= 0) {
                end = f->end[v];
                tokens[l.n] = (f->page_begin[v] + f->num_pages[v] - c->node_start[v]) * page;
            } else {
                while (end < f->n && node_at[end] < 0) end++;
            }
            rows[l.n] = row_indptr[end] - row_indptr[i];
            l.hbm_tokens += tokens[l.n++];
            i = end;
        }
        us += best_launch(m, &l, &backends[level]);
    }
    for (i64 v = 0; v < f->nodes; v++)
        if (c->kept[v]) unique -= f->num_pages[v] * page;
    for (i64 i = 0; i < f->n; i++) tokens[i] = max_of(context[i] - c->tail_start[i] * page - part_rows[i] / 2, 0);
    launch own = {part_rows, tokens, f->n, unique, 0, 0};
    us += best_launch(m, &own, &backends[c->num_levels - 1]);
    double row_heads = (double)row_indptr[f->n] * m->row_heads * (double)c->num_levels;
    us += m->merge_us + row_heads * m->merge_row_ns * 1e-3;
    return us;
}

/* CostModel._block_costs: picoseconds of a segment's blocks, fixed and per token. */
static void block_costs(const model *m, i64 rows, double *fixed, double *per_token) {
    i64 packed = rows * m->group_size;
    int tile = packed > m->tiles[0];
    if (m->small_head && packed > m->tiles[1]) tile++;
    double tiles = (double)tiles_of(m, packed, tile);
    *fixed = tiles * m->block_ps[tile];
    *per_token = tiles * m->token_ps[tile];
}

/* SegmentCost._item_costs, of one KV head. */
static void item_costs(const model *m, i64 rows, double *fixed, double *per_token) {
    int wide = rows * m->group_size > m->narrow_rows;
    double tiles = wide ? (double)ceil_div(rows, m->rows_per_tile) : 1.0;
    *fixed = tiles * m->segment_item_ps[wide];
    *per_token = tiles * m->segment_token_ps[wide];
}

/* SegmentCost.predict */
typedef struct {
    double work;
    i64 tokens, unique, longest, any; /* of the kind's segments: tokens times tiles, tokens, and the most of one */
    double share;             /* tokens of a piece */
} kind_of_segment;

static void add_segment(const model *m, i64 rows, i64 tokens, kind_of_segment *kinds) {
    int wide = rows * m->group_size > m->narrow_rows;
    kind_of_segment *k = kinds + wide;
    double fixed, per_token;
    item_costs(m, rows, &fixed, &per_token);
    k->work += (fixed + per_token * (double)tokens) * (double)m->num_kv_heads;
    k->tokens += (wide ? ceil_div(rows, m->rows_per_tile) : 1) * tokens;
    k->unique += tokens;
    k->longest = max_of(k->longest, tokens);
    k->any = 1;
}

static i64 pieces_of(const model *m, i64 rows, i64 tokens, const kind_of_segment *kinds) {
    double pieces = rint((double)tokens / kinds[rows * m->group_size > m->narrow_rows].share);
    return pieces > 1.0 ? (i64)pieces : 1;
}

static double segments_us(const model *m, const forest *f, const cut *c, const i64 *rows, const i64 *row_indptr,
                          const i64 *context) {
    kind_of_segment kinds[2] = {{0}, {0}};
    i64 partials = 0, page = m->page_size;
    for (i64 v = 0; v < f->nodes; v++) {
        if (!c->kept[v]) continue;
        i64 node_rows = row_indptr[f->end[v]] - row_indptr[f->begin[v]];
        add_segment(m, node_rows, (f->page_begin[v] + f->num_pages[v] - c->node_start[v]) * page, kinds);
    }
    for (i64 i = 0; i < f->n; i++)
        add_segment(m, rows[i], context[i] - c->tail_start[i] * page, kinds);
    double us = m->segment_launch_us;
    for (int wide = 1; wide >= 0; wide--) {
        kind_of_segment *k = kinds + wide;
        if (!k->any) continue;
        double busy = k->work * 1e-6 / (double)m->num_sms;
        if (wide) busy = longer(busy, (double)k->unique * m->hbm_us_per_token);
        double slots = (double)(m->segment_blocks_per_sm[wide] * m->num_sms);
        double share = (double)(k->tokens * m->num_kv_heads) / slots, least = (double)m->segment_min_tokens[wide];
        double longest = k->share = share > least ? share : least;
        if ((double)k->longest < longest) longest = (double)k->longest;
        us += longer(busy, longest * m->segment_token_ps[wide] * 1e-6 * m->segment_lone_block[wide]);
    }
    for (i64 v = 0; v < f->nodes; v++) {
        if (!c->kept[v]) continue;
        i64 node_rows = row_indptr[f->end[v]] - row_indptr[f->begin[v]];
        i64 tokens = (f->page_begin[v] + f->num_pages[v] - c->node_start[v]) * page;
        partials += node_rows * pieces_of(m, node_rows, tokens, kinds);
    }
    for (i64 i = 0; i < f->n; i++) {
        i64 pieces = pieces_of(m, rows[i], context[i] - c->tail_start[i] * page, kinds);
        if (pieces > 1) partials += rows[i] * pieces;
    }
    return us + (double)partials * m->segment_partial_ps * 1e-6 / (double)m->num_sms;
}

/* CostModel.fold_costs, or those of SegmentCost, and fold.best_cuts: masks is uint8[MAX_CANDIDATES, nodes].
 * Returns how many, -1 without memory.
 *
 * below[first[v] + j * count + k]: cost of all beneath node v for candidate k when the segment through it begins at
 * depth j; j = depth + 1 is behind the node. Costs are whole numbers, so that the order of additions is free.
 */
static i64 best_cuts(const model *m, const forest *f, const i64 *rows, const i64 *row_indptr, const i64 *context,
                     int segments, uint8_t *masks) {
    i64 nodes = f->nodes, total_rows = row_indptr[f->n], page = m->page_size;
    i64 count = segments ? 1 : NUM_WEIGHTS * (m->decode_group && total_rows == f->n ? 2 : 1);
    void (*costs)(const model *, i64, double *, double *) = segments ? item_costs : block_costs;
    double heads = (double)m->num_kv_heads, head_pages = (double)(m->num_kv_heads * page);
    double weights[MAX_CANDIDATES];
    double level_ps = m->launch_us * (double)m->num_sms * 1e6 / (double)total_rows;
    double partial_ps = m->row_heads * m->merge_row_ns * (double)m->num_sms * 1e3;
    for (i64 k = 0; k < count; k++) weights[k] = rint(partial_ps + level_ps * m->level_weights[k % NUM_WEIGHTS]);
    if (segments) weights[0] = m->segment_partial_ps;

    i64 *first = malloc((size_t)(nodes + 1) * sizeof(i64));
    double *tail = calloc((size_t)(nodes * 4), sizeof(double)); /* fixed and per page, for each of two kernels */
    if (!first || !tail) { free(first); free(tail); return -1; }
    first[0] = 0;
    for (i64 v = 0; v < nodes; v++) first[v + 1] = first[v] + (f->depth[v] + 2) * count;
    double *below = calloc((size_t)first[nodes], sizeof(double));
    uint8_t *keep = malloc((size_t)first[nodes]);
    i64 *ancestor = malloc((size_t)(nodes + 1) * sizeof(i64));
    if (!below || !keep || !ancestor) {
        free(first); free(tail); free(below); free(keep); free(ancestor);
        return -1;
    }
    for (i64 i = 0; i < f->n; i++) {
        i64 v = f->tail_node[i];
        if (v < 0) continue;
        double own = (double)(context[i] - f->tail_begin[i] * page), block, token;
        costs(m, rows[i], &block, &token);
        tail[4 * v] += (block + token * own) * heads;
        tail[4 * v + 1] += token * head_pages;
        tail[4 * v + 2] += (m->decode_block_ps + m->decode_token_ps * own) * heads;
        tail[4 * v + 3] += m->decode_token_ps * head_pages;
    }
    for (i64 v = nodes - 1; v >= 0; v--) {
        i64 depth = f->depth[v], page_end = f->page_begin[v] + f->num_pages[v];
        double *here = below + first[v], *up = depth ? below + first[f->parent[v]] : NULL;
        i64 node_rows = row_indptr[f->end[v]] - row_indptr[f->begin[v]];
        double fixed, per_token;
        costs(m, node_rows, &fixed, &per_token);
        fixed *= heads, per_token *= head_pages;
        for (i64 a = v, j = depth; j >= 0; j--, a = f->parent[a]) ancestor[j] = a;
        for (i64 k = 0; k < count; k++) here[(depth + 1) * count + k] += tail[4 * v + 2 * (k / NUM_WEIGHTS)];
        for (i64 j = 0; j <= depth; j++) {
            double pages = (double)(page_end - f->page_begin[ancestor[j]]);
            for (i64 k = 0; k < count; k++) {
                const double *own = tail + 4 * v + 2 * (k / NUM_WEIGHTS);
                double pass = here[j * count + k] + (own[0] + own[1] * pages);
                double kept = fixed + per_token * pages +
                              (weights[k] * (double)node_rows + here[(depth + 1) * count + k]);
                keep[first[v] + j * count + k] = kept < pass;
                if (up) up[j * count + k] += kept < pass ? kept : pass;
            }
        }
    }
    /* From the roots: at which depth the segment through each node begins, and so whether it is kept. */
    for (i64 k = 0; k < count; k++)
        for (i64 v = 0; v < nodes; v++) {
            i64 p = f->parent[v], j = 0;
            if (p >= 0) j = masks[k * nodes + p] ? f->depth[v] : ancestor[p];
            ancestor[v] = j;
            masks[k * nodes + v] = keep[first[v] + j * count + k];
        }
    free(first); free(tail); free(below); free(keep); free(ancestor);
    return count;
}

/* choose.Chooser._rate without a capacity.
 *
 * block, n, nodes: the forest. requests, n_all: the batch. cascade: whether to look for one.
 * out: i64[HEAD + 5 * n + 1 + 3 * nodes + ceil(nodes / 8)]: found; rows, context, row_indptr (PartShape); tail_start,
 * tail_above, node_start, node_level, node_above, kept (Cut).
 */
i64 fic_rate(const model *m, const i64 *block, i64 n, i64 nodes, const i64 *requests, i64 n_all, i64 cascade,
             i64 *out) {
    forest f = forest_of(block, n, nodes);
    batch b = batch_of(requests, n_all);
    found *result = (found *)out;
    out += HEAD;
    i64 page = m->page_size, unique = 0, status = NOTHING_PAYS, left = INT32_MAX;
    i64 *rows = out, *context = out + n, *row_indptr = out + 2 * n;
    i64 *scratch = malloc((size_t)(3 * n) * sizeof(i64));
    if (!scratch) return NO_MEMORY;
    i64 *some_rows = scratch, *tokens = scratch + n, *node_at = scratch + 2 * n;
    row_indptr[0] = 0;
    for (i64 i = 0; i < n; i++) {
        i64 r = f.order[i], shared = f.tail_begin[i] * page, own = round_tokens(b.seq_lens[r] - shared);
        rows[i] = b.qo_lens[r];
        row_indptr[i + 1] = row_indptr[i] + rows[i];
        context[i] = shared + own;
        unique += own;
        if (b.seq_lens[r]) left = min_of(left, context[i] - b.seq_lens[r]);
    }
    result->tokens_left = left;
    for (i64 v = 0; v < nodes; v++) unique += f.num_pages[v] * page;

    launch flat = {rows, tokens, n, unique, 0, 0};
    i64 seen = 0;
    for (i64 i = 0; i < n; i++) {
        tokens[i] = max_of(context[i] - rows[i] / 2, 0);
        if (m->window_left >= 0) tokens[i] = min_of(tokens[i], m->window_left + 1 + rows[i] / 2);
        seen += tokens[i];
    }
    if (m->window_left >= 0) flat.hbm_tokens = min_of(unique, seen);
    result->flat_us = best_launch(m, &flat, &result->flat_backend);
    if (!cascade || (!nodes && !m->rates_segments)) {
        free(scratch);
        return NOTHING_PAYS;
    }

    i64 cut_size = 2 * n + 3 * nodes + (nodes + 7) / 8;
    uint8_t *masks = malloc((size_t)(MAX_CANDIDATES * nodes) + 1);
    i64 *trial = malloc((size_t)cut_size * sizeof(i64) + 1);
    if (!masks || !trial) { status = NO_MEMORY; goto done; }
    for (int segments = 0; segments < 2; segments++) {
        if (!(segments ? m->rates_segments : m->rates_levels)) continue;
        i64 count = 1, distinct = 0;
        if (m->fold && nodes > 1) {
            count = best_cuts(m, &f, rows, row_indptr, context, segments, masks);
            if (count < 0) { status = NO_MEMORY; goto done; }
        } else {
            memset(masks, 1, (size_t)nodes);
        }
        for (i64 k = 0; k < count; k++) {
            const uint8_t *mask = masks + k * nodes;
            int again = !memchr(mask, 1, (size_t)nodes);
            for (i64 other = 0; other < distinct && !again; other++)
                again = !memcmp(masks + other * nodes, mask, (size_t)nodes);
            if (!again) memmove(masks + distinct++ * nodes, mask, (size_t)nodes);
        }
        if (!distinct && (segments || (m->forced && nodes))) memset(masks, !segments, (size_t)nodes), distinct = 1;
        for (i64 k = 0; k < distinct; k++) {
            i64 *at = trial + 2 * n;
            cut c = {(uint8_t *)(at + 3 * nodes), at, at + nodes, at + 2 * nodes, trial, trial + n, 0};
            i64 backends[MAX_LEVELS];
            memcpy(c.kept, masks + k * nodes, (size_t)nodes);
            cut_at(&f, &c);
            if (c.num_levels > m->max_levels) { status = TOO_DEEP; goto done; }
            double us;
            if (segments) {
                us = segments_us(m, &f, &c, rows, row_indptr, context);
                for (i64 level = 0; level < c.num_levels; level++) backends[level] = SEGMENTS;
            } else {
                us = levels_us(m, &f, &c, rows, row_indptr, context, unique, some_rows, tokens, node_at, backends);
            }
            if (status == FOUND && us >= result->us) continue;
            status = FOUND;
            result->us = us;
            result->num_levels = c.num_levels;
            memcpy(result->backends, backends, sizeof backends);
            memcpy(out + 3 * n + 1, trial, (size_t)cut_size * sizeof(i64));
        }
    }
done:
    free(masks);
    free(trial);
    free(scratch);
    return status;
}

/* layout._columns for one part.
 *
 * rated: the output of fic_rate that holds the cut; NULL when flat. *_at: requests, rows and segments of the parts
 * before, *_all: of the whole batch.
 * out: int32[2 * n_all + 1 + 2 * rows_all + 7 * segs_all], the arrays of a plan one after the other.
 */
i64 fic_columns(const i64 *block, i64 n, i64 nodes, const i64 *rated, i64 page, const i64 *requests, i64 n_at,
                i64 rows_at, i64 segs_at, i64 n_all, i64 rows_all, i64 segs_all, int32_t *out) {
    const i64 *tail_start = rated + HEAD + 3 * n + 1, *node_start = tail_start + 2 * n, *node_level = node_start + nodes;
    const uint8_t *kept = rated ? (const uint8_t *)(node_start + 3 * nodes) : NULL;
    i64 num_levels = rated ? ((const found *)rated)->num_levels : 1;
    batch b = batch_of(requests, n_all);
    forest f = forest_of(block, n, nodes);
    int32_t *order = out, *indptr = out + n_all, *row_order = indptr + n_all + 1, *row_pos = row_order + rows_all;
    int32_t *seg = row_pos + rows_all + segs_at;
    i64 *node_at = malloc((size_t)(2 * n_all) * sizeof(i64)), *q_begin = node_at + n_all;
    if (!node_at) return -1;
    for (i64 r = 0, row = 0; r < n_all; row += b.qo_lens[r++]) q_begin[r] = row;
    order += n_at, indptr += n_at;
    if (kept) {
        for (i64 i = 0; i < n; i++) order[i] = (int32_t)f.order[i];
    } else { /* the batch's own order */
        memset(node_at, 0, (size_t)n_all * sizeof(i64));
        for (i64 i = 0; i < n; i++) node_at[f.order[i]] = 1;
        for (i64 r = 0, i = 0; r < n_all; r++)
            if (node_at[r]) order[i++] = (int32_t)r;
    }
    i64 row = rows_at;
    for (i64 i = 0; i < n; i++) {
        i64 r = order[i], q = q_begin[r], position = b.seq_lens[r] ? b.seq_lens[r] - b.qo_lens[r] : -1;
        indptr[i] = (int32_t)row;
        for (i64 k = 0; k < b.qo_lens[r]; k++, row++) {
            row_order[row] = (int32_t)(q + k);
            row_pos[row] = (int32_t)(b.seq_lens[r] ? position + k : -1);
        }
    }
    indptr[n] = (int32_t)row;
    i64 s = 0;
    for (i64 level = 0; kept && level < num_levels - 1; level++) {
        memset(node_at, -1, (size_t)n * sizeof(i64));
        for (i64 v = 0; v < nodes; v++)
            if (kept[v] && node_level[v] == level) node_at[f.begin[v]] = v;
        for (i64 i = 0; i < n; i++) {
            i64 v = node_at[i];
            if (v < 0) continue;
            i64 pages = f.page_begin[v] + f.num_pages[v] - node_start[v];
            seg[s] = indptr[i];
            seg[s + segs_all] = indptr[f.end[v]] - indptr[i];
            seg[s + 2 * segs_all] = (int32_t)(b.page_begin[order[i]] + node_start[v]);
            seg[s + 3 * segs_all] = (int32_t)pages;
            seg[s + 4 * segs_all] = (int32_t)(node_start[v] * page);
            seg[s + 5 * segs_all] = (int32_t)(pages * page);
            seg[s++ + 6 * segs_all] = (int32_t)level;
        }
    }
    for (i64 i = 0; i < n; i++, s++) {
        i64 r = order[i], start = kept ? tail_start[i] : 0;
        seg[s] = indptr[i];
        seg[s + segs_all] = indptr[i + 1] - indptr[i];
        seg[s + 2 * segs_all] = (int32_t)(b.page_begin[r] + start);
        seg[s + 3 * segs_all] = (int32_t)(b.page_counts[r] - start);
        seg[s + 4 * segs_all] = (int32_t)(start * page);
        seg[s + 5 * segs_all] = (int32_t)(b.seq_lens[r] - start * page);
        seg[s + 6 * segs_all] = (int32_t)(num_levels - 1);
    }
    free(node_at);
    return row;
}

/* Which requests share what, request by request.
 *
 * Requests stand in an order in which those that share a run of pages are neighbours. member: slot at each position;
 * lcp: pages that it shares with the next one; split: its first page that differs from the one before, -1 if it could
 * not share one.
 */
typedef struct {
    i64 n, *member, *lcp, *split;
} trie;

enum { MAX_PARTS = 2, NOWHERE = -1 };

/* What a session knows of its requests, by slot; native.State. */
typedef struct {
    const int32_t *ids;                                           /* of the pool */
    const i64 *begin, *seq_lens, *computed_lens, *last_rows;      /* of the pool and of the session */
    i64 *part, *limit, *tail_begin, *rank;                        /* of sharing.Sharing */
    trie tries[MAX_PARTS];
} state;

/* PlanSession._gather: the batch, from its slots.
 *
 * rows: by request, NULL for the tokens since the last plan. out: i64[4 * n + 3], the batch's block, then rows, pages
 * and requests with more than max_decode_rows rows.
 */
void fic_gather(const state *st, const i64 *slots, i64 n, i64 page, i64 max_decode_rows, const i64 *rows, i64 *out) {
    i64 *begin = out, *counts = out + n, *lens = out + 2 * n, *row_out = out + 3 * n, *total = out + 4 * n;
    memset(total, 0, 3 * sizeof(i64));
    for (i64 i = 0; i < n; i++) {
        i64 s = slots[i], len = st->seq_lens[s], num = rows ? rows[i] : len - st->computed_lens[s];
        if (!num) num = min_of(st->last_rows[s], max_of(len, 1));
        begin[i] = st->begin[s];
        counts[i] = ceil_div(len, page);
        lens[i] = len;
        row_out[i] = num;
        total[0] += num;
        total[1] += counts[i];
        total[2] += num > max_decode_rows;
    }
}

static i64 page_of(const state *st, i64 slot, i64 depth) {
    return depth < st->limit[slot] ? st->ids[st->begin[slot] + depth] : -1;
}

static void trie_remove(trie *t, i64 slot) {
    i64 i = 0, n = t->n;
    while (i < n && t->member[i] != slot) i++;
    if (i == n) return;
    size_t behind = (size_t)(n - i - 1) * sizeof(i64);
    if (i + 1 < n && (i == 0 || t->lcp[i - 1] < t->lcp[i])) t->split[i + 1] = t->split[i];
    if (i > 0) t->lcp[i - 1] = min_of(t->lcp[i - 1], t->lcp[i]);
    memmove(t->member + i, t->member + i + 1, behind);
    memmove(t->lcp + i, t->lcp + i + 1, behind);
    memmove(t->split + i, t->split + i + 1, behind);
    t->n--;
}

static void trie_insert(const state *st, trie *t, i64 slot) {
    i64 n = t->n, low = 0, high = n, depth = 0, limit = st->limit[slot];
    i64 at = n, above = 0; /* where it goes, and what it shares with the one before */
    for (;;) {
        i64 page = page_of(st, slot, depth), first = high, end;
        at = high, above = depth;
        if (page >= 0 && low < high) {
            if (page_of(st, t->member[low], depth) == page) first = low;
            else
                for (i64 i = low + 1; i < high; i++)
                    if (t->lcp[i - 1] == depth && t->split[i] == page) { first = i; break; }
        }
        if (first == high) break;
        i64 run = st->limit[t->member[first]];
        for (end = first + 1; end < high && t->lcp[end - 1] > depth; end++) run = min_of(run, t->lcp[end - 1]);
        const int32_t *mine = st->ids + st->begin[slot], *its = st->ids + st->begin[t->member[first]];
        i64 most = min_of(run, limit), same = depth + 1;
        while (same + 64 <= most && !memcmp(mine + same, its + same, 64 * sizeof(int32_t))) same += 64;
        while (same < most && mine[same] == its[same]) same++;
        at = end, above = same;
        if (same < run || end == first + 1) break;
        low = first, high = end, depth = same;
    }
    size_t behind = (size_t)(n - at) * sizeof(i64);
    memmove(t->member + at + 1, t->member + at, behind);
    memmove(t->lcp + at + 1, t->lcp + at, behind);
    memmove(t->split + at + 1, t->split + at, behind);
    t->member[at] = slot;
    t->lcp[at] = at > 0 ? t->lcp[at - 1] : 0;
    if (at > 0) t->lcp[at - 1] = above;
    t->split[at] = page_of(st, slot, at > 0 ? above : 0);
    t->n++;
}

/* Sharing._leave. */
void fic_leave(state *st, i64 slot) {
    if (st->part[slot] != NOWHERE) trie_remove(&st->tries[st->part[slot]], slot);
    st->part[slot] = NOWHERE;
}

/* The stale requests of Sharing.forests hang up anew; returns how many.
 *
 * All are taken out first: where one belongs is judged by those that are in. max_decode_rows: more rows make a request
 * part 1; -1 when there is one part.
 */
i64 fic_share(state *st, const i64 *slots, i64 n, i64 page, const i64 *requests, i64 max_decode_rows) {
    batch b = batch_of(requests, n);
    i64 stale = 0;
    for (i64 i = 0; i < n; i++) {
        i64 s = slots[i], part = max_decode_rows >= 0 && b.qo_lens[i] > max_decode_rows;
        i64 limit = max_of(b.seq_lens[i] - b.qo_lens[i], 0) / page, before = st->limit[s];
        if (st->part[s] != part || (limit != before && min_of(limit, before) <= st->tail_begin[s])) {
            fic_leave(st, s);
            stale++;
        }
        st->limit[s] = limit;
        st->rank[s] = i;
    }
    for (i64 i = 0; stale && i < n; i++) {
        i64 s = slots[i];
        if (st->part[s] != NOWHERE) continue;
        st->part[s] = max_decode_rows >= 0 && b.qo_lens[i] > max_decode_rows;
        trie_insert(st, &st->tries[st->part[s]], s);
    }
    return stale;
}

/* forest.build_forest: the nodes, numbered and ordered by the requests' ranks in the batch.
 *
 * number_of_part: which trie. num_ranks: requests of the batch. block: i64[10 * n], the forest. Returns the number of
 * nodes, -1 without memory.
 */
i64 fic_forest(state *st, i64 number_of_part, i64 num_ranks, i64 *block) {
    trie t = st->tries[number_of_part];
    const i64 *rank = st->rank;
    i64 n = t.n;
    i64 *memory = malloc((size_t)(14 * n + num_ranks + 4) * sizeof(i64));
    if (!memory) return -1;
    i64 *lcp = memory, *parent = lcp + n, *some = parent + n, *stack = some + n, *tail = stack + n;
    i64 *first = tail + n, *last = first + n + 1, *next = last + n + 1, *number = next + 2 * n;
    i64 *depth = number + n, *from = depth + n, *to = from + n, *sequence = to + n, *position = sequence + n;
    i64 nodes = 0, top = 0;

    /* Nodes are intervals of the order: lcp is their last page's end, some any position inside. stack holds the open
     * ones; the node that a position shares most with is its tail. */
    for (i64 i = 0; i < n; i++) {
        i64 shared = i + 1 < n ? t.lcp[i] : 0; /* with the next one */
        if (shared > (top ? lcp[stack[top - 1]] : 0)) {
            lcp[nodes] = shared, some[nodes] = i;
            parent[nodes] = top ? stack[top - 1] : -1;
            stack[top++] = nodes++;
        }
        tail[i] = top ? stack[top - 1] : -1;
        i64 closed = -1;
        while (top && lcp[stack[top - 1]] > shared) {
            closed = stack[--top];
            if (shared > (top ? lcp[stack[top - 1]] : 0)) {
                /* An interval that began with the closed one, and is longer. */
                lcp[nodes] = shared, some[nodes] = some[closed];
                parent[nodes] = parent[closed];
                parent[closed] = nodes;
                stack[top++] = nodes++;
            }
        }
    }

    /* Children by their first request in the batch: visit requests by rank and hang up what is new above them. Children
     * are nodes, or n + position; lists are linked through next. */
    for (i64 r = 0; r < num_ranks; r++) position[r] = -1;
    for (i64 i = 0; i < n; i++) position[rank[t.member[i]]] = i;
    for (i64 v = 0; v <= nodes; v++) first[v] = -1; /* nodes: of the root */
    for (i64 v = 0; v < nodes; v++) number[v] = -1;
    for (i64 r = 0; r < num_ranks; r++) {
        if (position[r] < 0) continue;
        i64 child = n + position[r], above = tail[position[r]];
        for (;;) {
            i64 list = above < 0 ? nodes : above;
            int is_new = first[list] < 0;
            next[child] = -1;
            if (is_new) first[list] = child;
            else next[last[list]] = child;
            last[list] = child;
            if (above < 0 || !is_new) break;
            child = above, above = parent[above];
        }
    }

    /* Depth first: positions. Nodes of equal depth are met in the order of their begins; they are numbered by depth. */
    i64 *order = block, *tail_node = block + n, *tails = block + 2 * n, *node = block + 3 * n;
    i64 *depth_count = last; /* no longer needed by then */
    i64 at = 0, seen = 0, here = nodes, child = first[nodes], level = -1;
    for (;;) {
        if (child < 0) { /* the list of `here` is done */
            if (here == nodes) break;
            to[here] = at;
            child = next[here];
            here = parent[here] < 0 ? nodes : parent[here];
            level--;
        } else if (child >= n) {
            i64 i = child - n;
            order[at] = rank[t.member[i]];
            tail_node[at] = here == nodes ? -1 : here;
            tails[at] = st->tail_begin[t.member[i]] = here == nodes ? 0 : lcp[here];
            at++;
            child = next[child];
        } else {
            level++;
            depth[child] = level;
            from[child] = at;
            sequence[seen++] = child;
            here = child;
            child = first[child];
        }
    }
    for (i64 d = 0; d <= nodes; d++) depth_count[d] = 0;
    for (i64 v = 0; v < nodes; v++) depth_count[depth[v]]++;
    for (i64 d = 0, sum = 0; d <= nodes; d++) {
        i64 here_count = depth_count[d];
        depth_count[d] = sum;
        sum += here_count;
    }
    for (i64 k = 0; k < nodes; k++) number[sequence[k]] = depth_count[depth[sequence[k]]]++;
    for (i64 v = 0; v < nodes; v++) {
        i64 x = number[v], up = parent[v], start = up < 0 ? 0 : lcp[up];
        node[x] = up < 0 ? -1 : number[up];
        node[nodes + x] = depth[v];
        node[2 * nodes + x] = from[v];
        node[3 * nodes + x] = to[v];
        node[4 * nodes + x] = start;
        node[5 * nodes + x] = lcp[v] - start;
        node[6 * nodes + x] = st->ids[st->begin[t.member[some[v]]] + start];
    }
    for (i64 i = 0; i < n; i++)
        if (tail_node[i] >= 0) tail_node[i] = number[tail_node[i]];
    free(memory);
    return nodes;
}

/* Steady._grow and, where rating is asked for, Chooser._rate, for a batch of one part and a row a request.
 *
 * cascade: as for fic_rate, -1 not to rate. before, growth: int32[n + segs], row_pos and seg_kv_len of the plan before,
 * and what a step adds to them. last: the output of fic_rate that the plan was chosen by. scratch: i64[4 * n + 3].
 * rated: as for fic_rate. grown: int32[n + 2 * segs], the two arrays and seg_num_pages.
 * Returns the status of fic_rate; DIFFERENT when it comes to another plan, were the executor the same; UNRATED.
 */
enum { DIFFERENT = 5, UNRATED = 6 }; /* native.Status */

i64 fic_steady(const model *m, const state *st, const i64 *slots, i64 n, const i64 *block, i64 nodes, i64 cascade,
               const int32_t *before, const int32_t *growth, i64 segs, const i64 *last, i64 is_flat, i64 *scratch,
               i64 *rated, int32_t *grown) {
    int32_t *pages = grown + n + segs;
    for (i64 i = 0; i < n + segs; i++) grown[i] = before[i] + growth[i];
    for (i64 i = 0; i < segs; i++) pages[i] = (int32_t)ceil_div(grown[n + i], m->page_size);
    if (cascade < 0) return UNRATED;
    fic_gather(st, slots, n, m->page_size, INT32_MAX, NULL, scratch);
    i64 status = fic_rate(m, block, n, nodes, scratch, n, cascade, rated);
    const found *now = (const found *)rated, *then = (const found *)last;
    i64 kept = HEAD + 5 * n + 1 + 3 * nodes;
    if (is_flat) return now->flat_backend == then->flat_backend ? status : DIFFERENT;
    if (status != FOUND) return status;
    size_t levels = (size_t)now->num_levels * sizeof(i64);
    if (now->num_levels != then->num_levels || memcmp(now->backends, then->backends, levels) ||
        memcmp(rated + kept, last + kept, (size_t)nodes))
        return DIFFERENT;
    return status;
}

/* lower.Tiling, and what of the configuration counts; native_lower.Tiles. */
enum { MAX_BLOCKS = 4, FIELDS = 8, WINDOW = 32 }; /* as in native_lower.py */
typedef struct {
    i64 num_sms, group_size, num_kv_heads, wide_rows, wide_tokens, wide_blocks, wide_tiles, min_cut, short_rows;
    i64 short_tokens, narrow_rows, short_tile_tokens, narrow_tile_tokens, min_run_tiles, max_finished;
    i64 num_short_blocks, num_narrow_blocks, short_blocks[MAX_BLOCKS], narrow_blocks[MAX_BLOCKS];
} tiles;

/* The segments of a part, sorted by level; rows counted from row_0. */
typedef struct {
    const int32_t *row_begin, *num_rows, *kv_start, *kv_len, *row_pos;
    const i64 *page_begin;
    i64 n, row_0, rows;
} segments;

/* native_lower.LoweredRoom, and native_lower.Sizes. */
typedef struct {
    i64 num_wide, num_double, num_items[2], num_runs[2], num_partials, num_rows, page_begin;
} sizes;

typedef struct {
    int32_t *wide, *items[2], *runs[2], *partial_indptr, *combined; /* two streams: short and narrow */
    sizes most;
} room;

/* cuts.py */
enum { ITEM_TOKENS = 64, PIECE_TOKENS = 8, SLACK_OVER = 5, SLACK_UNDER = 4, LONE = 9, NOT_LONE = 16, NUM_SHARES = 5 };
enum { LEVELS = 64 };
static const i64 SHARES[NUM_SHARES] = {8, 9, 10, 12, 16};

static i64 num_runs(const tiles *t, i64 blocks) { return max_of(t->num_sms * blocks / t->num_kv_heads, 1); }

/* Positions 0..n in the order of falling keys, none negative, equal ones as they come. spare is of n entries. */
static void sort_falling(const i64 *key, i64 n, i64 *order, i64 *spare) {
    i64 most = 0, *from = order, *to = spare;
    for (i64 i = 0; i < n; i++) order[i] = i, most = max_of(most, key[i]);
    for (int shift = 0; most >> shift > 0; shift += 8) {
        i64 begin[257] = {0};
        for (i64 k = 0; k < n; k++) begin[256 - (key[k] >> shift & 255)]++; /* 255 is the first digit */
        for (int digit = 1; digit < 256; digit++) begin[digit] += begin[digit - 1];
        for (i64 k = 0; k < n; k++) to[begin[255 - (key[from[k]] >> shift & 255)]++] = from[k];
        i64 *swap = from;
        from = to, to = swap;
    }
    if (from != order) memcpy(order, from, (size_t)n * sizeof(i64));
}

/* cuts.Stream: order, first_run and pieces are of the items; run_item, run_tiles and run_begin of the runs. */
typedef struct {
    i64 *order, *first_run, *pieces, *run_item, *run_tiles, *run_begin;
} stream;

/* cuts._deal, and the tiles of the longest run. sorted: items, the longest first. */
static i64 deal(const i64 *length, const i64 *sorted, i64 n, i64 runs, i64 *run_of, i64 *load) {
    i64 most = 0, run = 0, step = 1;
    memset(load, 0, (size_t)runs * sizeof(i64));
    for (i64 rank = 0; rank < n; rank++) {
        i64 item = sorted[rank];
        run_of[item] = run;
        most = max_of(most, load[run] += length[item]);
        if (run + step < 0 || run + step == runs) step = -step; /* once more, and back */
        else run += step;
    }
    return most;
}

/* cuts._cut_evenly; returns the tiles of the longest run. */
static i64 cut_evenly(const i64 *length, i64 n, i64 total, i64 most_used, i64 runs, i64 min_run_tiles, stream *s) {
    i64 used = min_of(most_used, ceil_div(total, min_run_tiles)), longest = 0, item = 0, begin = 0;
    for (i64 run = 0; run < runs; run++) {
        i64 cut = min_of(run, used) * total / used, next = min_of(run + 1, used) * total / used;
        while (begin + length[item] <= cut && item < n - 1) begin += length[item++];
        s->run_item[run] = item, s->run_tiles[run] = next - cut, s->run_begin[run] = cut - begin;
        longest = max_of(longest, next - cut);
    }
    i64 run = 0, next = total / used; /* where the run after this begins */
    begin = 0;
    for (i64 i = 0; i < n; i++) {
        s->order[i] = i;
        while (next <= begin) run++, next = (run + 1) * total / used;
        s->first_run[i] = run;
        begin += length[i];
        while (next < begin) run++, next = (run + 1) * total / used;
        s->pieces[i] = run - s->first_run[i] + 1;
    }
    return longest;
}

/* cuts.cut_stream, of the n segments in seg. runs: the numbers there may be. scratch: 3 * n and the most runs. */
static void cut_stream(const segments *g, const i64 *seg, i64 n, const i64 *runs, i64 num, i64 tile_tokens,
                       i64 min_run_tiles, int may_cut, i64 *scratch, stream *s) {
    i64 most_runs = runs[num - 1], total = 0, count = 0, longest = 0;
    i64 *length = scratch, *sorted = scratch + n, *run_of = scratch + 2 * n, *load = scratch + 3 * n;
    for (i64 i = 0; i < n; i++) total += length[i] = ceil_div(g->kv_len[seg[i]], tile_tokens);
    if (n) sort_falling(length, n, sorted, run_of);
    for (i64 k = 0; k < num && n; k++) {
        i64 most = deal(length, sorted, n, runs[k], run_of, load);
        if (longest && most * 10 > longest * 9) continue;
        longest = most, count = runs[k];
        memcpy(s->first_run, run_of, (size_t)n * sizeof(i64));
    }
    if (may_cut && SLACK_UNDER * longest * count > SLACK_OVER * total) {
        i64 extra = 0;
        memcpy(run_of, s->first_run, (size_t)n * sizeof(i64));
        i64 even = cut_evenly(length, n, total, runs[0], most_runs, min_run_tiles, s);
        for (i64 i = 0; i < n; i++) extra += g->num_rows[seg[i]] * (s->pieces[i] - 1);
        i64 cut = max_of(SLACK_OVER * total, SLACK_UNDER * even * runs[0]) * tile_tokens;
        if (cut + SLACK_OVER * PIECE_TOKENS * extra < SLACK_UNDER * longest * count * tile_tokens) return;
        memcpy(s->first_run, run_of, (size_t)n * sizeof(i64));
    }
    memset(s->run_item, 0, (size_t)most_runs * sizeof(i64));
    memset(s->run_tiles, 0, (size_t)most_runs * sizeof(i64));
    memset(s->run_begin, 0, (size_t)most_runs * sizeof(i64));
    for (i64 i = 0; i < n; i++) {
        s->pieces[i] = 1;
        s->run_item[s->first_run[i]]++;
        s->run_tiles[s->first_run[i]] += length[i];
    }
    for (i64 run = 0, sum = 0; run < most_runs; run++) {
        i64 items = s->run_item[run];
        s->run_item[run] = load[run] = sum;
        sum += items;
    }
    for (i64 i = 0; i < n; i++) s->order[load[s->first_run[i]]++] = i;
}

/* cuts._wide_time, where segments have tiles of per_tile rows. */
static i64 wide_time(const segments *g, const i64 *seg, i64 n, i64 per_tile, const i64 *chunk, i64 slots,
                     i64 blocks_per_sm) {
    i64 items[LEVELS] = {0}, longest = 0, pieces_of_rows = 0, num = 0, time = 0, last = 0;
    for (i64 k = 0; k < n; k++) longest = max_of(longest, min_of(chunk[k], g->kv_len[seg[k]]));
    for (i64 k = 0; k < n; k++) {
        i64 length = g->kv_len[seg[k]], rows = g->num_rows[seg[k]], num_tiles = ceil_div(rows, per_tile);
        i64 before = (length - 1) / chunk[k]; /* pieces but the last */
        if (before) items[(chunk[k] * LEVELS - 1) / longest] += num_tiles * before;
        items[((length - before * chunk[k]) * LEVELS - 1) / longest] += num_tiles;
        pieces_of_rows += rows * (before + 1);
        num += num_tiles * (before + 1);
    }
    i64 waves = ceil_div(num, slots), until = 0, wave = 0;
    for (i64 level = LEVELS - 1; level >= 0; level--) {
        until += items[level];
        i64 begun = min_of(ceil_div(until, slots), waves); /* waves whose longest item is so long or longer */
        if (begun == wave) continue;
        last = (level + 1) * longest / LEVELS + ITEM_TOKENS;
        time += (begun - wave) * last;
        wave = begun;
    }
    time *= NOT_LONE;
    if (blocks_per_sm > 1 && (num - (waves - 1) * slots) * blocks_per_sm <= slots) time -= last * (NOT_LONE - LONE);
    return time * slots + pieces_of_rows * PIECE_TOKENS * NOT_LONE;
}

/* cuts.cut_wide. spare is of n entries. */
static void cut_wide(const tiles *t, const segments *g, const i64 *seg, i64 n, i64 per_tile, i64 *chunk, i64 *spare) {
    i64 total = 0, least = 0, before = 0, blocks = t->wide_tiles > 1 ? 1 : t->wide_blocks;
    for (i64 k = 0; k < n; k++) {
        i64 num_tiles = ceil_div(g->num_rows[seg[k]], per_tile);
        total += num_tiles * g->kv_len[seg[k]];
        if (num_tiles > 1) blocks = t->wide_blocks;
    }
    i64 slots = num_runs(t, blocks);
    for (int k = 0; k < NUM_SHARES && n; k++) {
        i64 share = total * SHARES[k], over = 8 * slots;
        if (share < t->min_cut * over) share = t->min_cut, over = 1;
        if (share == before) break;
        before = share;
        i64 items = 0;
        for (i64 i = 0; i < n; i++) {
            i64 length = g->kv_len[seg[i]], cuts = max_of((2 * length * over + share) / (2 * share), 1);
            spare[i] = ceil_div(ceil_div(length, cuts), t->wide_tokens) * t->wide_tokens;
            items += ceil_div(g->num_rows[seg[i]], per_tile) * ceil_div(length, spare[i]);
        }
        i64 time = items > slots || least ? wide_time(g, seg, n, per_tile, spare, slots, blocks) : 0;
        if (!least || time * 16 < least * 15) {
            least = time;
            memcpy(chunk, spare, (size_t)n * sizeof(i64));
        }
        if (items <= slots) break;
    }
}

/* items.stream_items and stream_runs. */
static void write_stream(const segments *g, const i64 *seg, i64 n, const stream *s, const i64 *above,
                         const i64 *number, const int32_t *partial_indptr, i64 tile_tokens, i64 runs, int32_t *items,
                         int32_t *record) {
    for (i64 k = 0; k < n; k++) {
        int32_t *item = items + k * FIELDS;
        i64 at = seg[s->order[k]], row = g->row_begin[at] - g->row_0;
        item[0] = (int32_t)row, item[1] = g->num_rows[at], item[2] = (int32_t)g->page_begin[at];
        item[3] = g->kv_len[at], item[4] = partial_indptr[row], item[5] = (int32_t)number[at];
        item[6] = (int32_t)(above[at] - s->first_run[s->order[k]]), item[7] = g->kv_start[at];
    }
    memset(items + n * FIELDS, 0, WINDOW * FIELDS * sizeof(int32_t));
    for (i64 run = 0; run < runs; run++, record += FIELDS) {
        memcpy(record, items + s->run_item[run] * FIELDS, 3 * sizeof(int32_t));
        record[3] = (int32_t)s->run_item[run], record[4] = (int32_t)s->run_tiles[run];
        record[5] = (int32_t)(s->run_begin[run] * tile_tokens), record[6] = record[7] = 0;
    }
}

/* items.wide_items, and zeros behind them. scratch: 6 * n. */
static void write_wide(const segments *g, const i64 *seg, i64 n, i64 per_tile, i64 together, const i64 *chunk,
                       const i64 *above, const i64 *number, i64 *scratch, int32_t *wide, i64 num_double, i64 num,
                       i64 most) {
    i64 *length = scratch, *order = scratch + 2 * n, *spare = scratch + 4 * n, per_item = per_tile * together;
    int32_t *of_two = wide, *of_one = wide + num_double * FIELDS;
    for (i64 k = 0; k < n; k++) {
        i64 kv_len = g->kv_len[seg[k]];
        length[2 * k] = min_of(chunk[k], kv_len); /* all pieces but the last, and that */
        length[2 * k + 1] = kv_len - (kv_len - 1) / chunk[k] * chunk[k];
    }
    sort_falling(length, 2 * n, order, spare);
    for (i64 k = 0; k < 2 * n; k++) {
        i64 of = order[k] / 2, i = seg[of], kv_len = g->kv_len[i], row = g->row_begin[i] - g->row_0;
        i64 last = (kv_len - 1) / chunk[of], blocks = ceil_div(g->num_rows[i], per_item);
        i64 seen = min_of((i64)g->row_pos[g->row_begin[i]] + 1 - g->kv_start[i], kv_len);
        i64 piece = order[k] % 2 ? last : 0, behind = order[k] % 2 ? last + 1 : last;
        for (; piece < behind; piece++) {
            i64 begin = piece * chunk[of], end = min_of(begin + chunk[of], kv_len);
            for (i64 block = 0; block < blocks; block++) {
                i64 of_block = min_of(g->num_rows[i] - block * per_item, per_item);
                int32_t **next = of_block > per_tile ? &of_two : &of_one, *item = *next;
                *next += FIELDS;
                item[0] = (int32_t)(row + block * per_item), item[1] = (int32_t)of_block;
                item[2] = (int32_t)g->page_begin[i], item[3] = (int32_t)begin, item[4] = (int32_t)end;
                item[5] = (int32_t)min_of(max_of(seen, begin), end);
                item[6] = number[i] == 1 ? -1 : (int32_t)(above[i] + piece);
                item[7] = g->kv_start[i];
            }
        }
    }
    if (most > num) memset(wide + num * FIELDS, 0, (size_t)((most - num) * FIELDS) * sizeof(int32_t));
}

static i64 *take(i64 **memory, i64 count) {
    i64 *taken = *memory;
    *memory += count;
    return taken;
}

/* lower.lower_into. Returns 0, 1 if there is no room for what `needed` says, or -1 without memory; writes to the room in
 * the first case alone. */
i64 fic_lower(const tiles *t, const segments *g, const room *into, sizes *needed) {
    const i64 *blocks[2] = {t->short_blocks, t->narrow_blocks};
    const i64 num_blocks[2] = {t->num_short_blocks, t->num_narrow_blocks};
    const i64 tile_tokens[2] = {t->short_tile_tokens, t->narrow_tile_tokens};
    i64 n = g->n, rows = g->rows, per_tile = t->wide_rows / t->group_size, num[3] = {0}, runs[2][MAX_BLOCKS], most[2];
    i64 together = 1;
    for (int k = 0; k < 2; k++) {
        for (i64 b = 0; b < num_blocks[k]; b++) runs[k][b] = num_runs(t, blocks[k][b]);
        most[k] = runs[k][num_blocks[k] - 1];
    }
    i64 *memory = malloc((size_t)(21 * n + 2 * rows + 4 * (most[0] + most[1])) * sizeof(i64)), *left = memory;
    if (!memory) return -1;
    i64 *seg[3]; /* wide, short and narrow segments */
    for (int k = 0; k < 3; k++) seg[k] = take(&left, n);
    i64 *kind = take(&left, n), *pieces = take(&left, n), *number = take(&left, n), *chunk = take(&left, n);
    i64 *above = take(&left, n), *above_narrow = take(&left, n); /* pieces above each segment, the same for all its rows */
    i64 *counts = take(&left, rows), *counts_narrow = take(&left, rows);
    i64 *scratch = take(&left, 6 * n + most[0] + most[1]);
    stream streams[2];
    for (int k = 0; k < 2; k++) {
        i64 *of_items = take(&left, 3 * n), *of_runs = take(&left, 3 * most[k]);
        streams[k] = (stream){of_items, of_items + n, of_items + 2 * n, of_runs, of_runs + most[k], of_runs + 2 * most[k]};
    }

    needed->page_begin = 0, needed->num_rows = rows;
    for (i64 i = 0; i < n; i++) {
        i64 packed = g->num_rows[i] * t->group_size, length = g->kv_len[i];
        needed->page_begin = max_of(needed->page_begin, g->page_begin[i]);
        kind[i] = -1, pieces[i] = 0;
        if (!length) continue;
        kind[i] = packed <= t->narrow_rows ? 2 : packed <= t->short_rows && length <= t->short_tokens;
        seg[kind[i]][num[kind[i]]++] = i;
    }
    for (int may_cut = 1; may_cut >= 0; may_cut--) {
        needed->num_wide = needed->num_double = needed->num_partials = 0;
        i64 of_two = 0; /* items, were two tiles together wherever there are */
        for (i64 k = 0; k < num[0]; k++) chunk[k] = g->kv_len[seg[0][k]];
        if (may_cut) cut_wide(t, g, seg[0], num[0], per_tile, chunk, scratch);
        for (i64 k = 0; k < num[0]; k++) {
            i64 i = seg[0][k];
            pieces[i] = ceil_div(g->kv_len[i], chunk[k]);
            needed->num_wide += ceil_div(g->num_rows[i], per_tile) * pieces[i];
            of_two += ceil_div(ceil_div(g->num_rows[i], per_tile), t->wide_tiles) * pieces[i];
        }
        together = of_two * t->num_kv_heads * 2 <= t->num_sms ? 1 : t->wide_tiles;
        if (together > 1) needed->num_double = needed->num_wide - of_two, needed->num_wide = of_two;
        for (int k = 0; k < 2; k++) {
            const i64 *of = seg[1 + k];
            cut_stream(g, of, num[1 + k], runs[k], num_blocks[k], tile_tokens[k], t->min_run_tiles, may_cut, scratch,
                       &streams[k]);
            for (i64 j = 0; j < num[1 + k]; j++) pieces[of[j]] = streams[k].pieces[j];
        }
        memset(counts, 0, (size_t)rows * sizeof(i64));
        memset(counts_narrow, 0, (size_t)rows * sizeof(i64));
        for (i64 i = 0; i < n; i++) {
            i64 row = g->row_begin[i] - g->row_0, end = row + g->num_rows[i];
            above[i] = counts[row], above_narrow[i] = counts_narrow[row];
            for (i64 r = row; r < end; r++) counts[r] += pieces[i];
            if (kind[i] == 2)
                for (i64 r = row; r < end; r++) counts_narrow[r] += pieces[i];
        }
        for (i64 r = 0; r < rows; r++) needed->num_partials += counts[r];
        for (i64 i = 0; i < n; i++) { /* 1 if its rows have no other piece, more if it finishes its row */
            i64 row = g->row_begin[i] - g->row_0;
            number[i] = counts[row] == 1;
            if (kind[i] != 2 || pieces[i] != 1 || g->num_rows[i] != 1 || above_narrow[i]) continue;
            if (!above[i] || above[i] > t->max_finished || counts[row] != above[i] + 1) continue;
            number[i] = above[i] + 1;
            needed->num_partials--;
        }
        if (needed->num_partials <= into->most.num_partials) break;
    }
    for (int k = 0; k < 2; k++) needed->num_items[k] = num[1 + k], needed->num_runs[k] = num[1 + k] ? most[k] : 0;
    const i64 *have = &into->most.num_wide, *want = &needed->num_wide;
    for (size_t k = 0; k < sizeof(sizes) / sizeof(i64); k++)
        if (want[k] > have[k]) { free(memory); return 1; }

    for (i64 r = 0; r < rows; r++) into->combined[r] = counts[r] == 1 ? -1 : (int32_t)counts[r];
    for (i64 i = 0; i < n; i++) {
        if (number[i] < 2) continue;
        into->combined[g->row_begin[i] - g->row_0] = -1;
        counts[g->row_begin[i] - g->row_0]--;
    }
    into->partial_indptr[0] = 0;
    for (i64 r = 0; r < rows; r++) into->partial_indptr[r + 1] = into->partial_indptr[r] + (int32_t)counts[r];
    for (i64 r = rows; r < into->most.num_rows; r++) {
        into->partial_indptr[r + 1] = into->partial_indptr[r];
        into->combined[r] = 0;
    }
    for (int k = 0; k < 2; k++) {
        i64 used = needed->num_runs[k], spare = into->most.num_runs[k] - used;
        if (into->items[k])
            write_stream(g, seg[1 + k], num[1 + k], &streams[k], above, number, into->partial_indptr, tile_tokens[k],
                         used, into->items[k], into->runs[k]);
        if (spare) memset(into->runs[k] + used * FIELDS, 0, (size_t)(spare * FIELDS) * sizeof(int32_t));
    }
    if (into->wide)
        write_wide(g, seg[0], num[0], per_tile, together, chunk, above, number, scratch, into->wide,
                   needed->num_double, needed->num_wide, into->most.num_wide);
    free(memory);
    return 0;
}
