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
        add_segment(m, rows[i], max_of(context[i] - c->tail_start[i] * page - rows[i] / 2, 0), kinds);
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
        i64 pieces = pieces_of(m, rows[i], max_of(context[i] - c->tail_start[i] * page - rows[i] / 2, 0), kinds);
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
enum { MAX_BLOCKS = 4, FIELDS = 8, WINDOW = 32 }; /* native_lower.MAX_BLOCKS; lower.FIELDS, WINDOW */
typedef struct {
    i64 num_sms, group_size, num_kv_heads, wide_rows, wide_tokens, wide_blocks, min_cut, short_rows, short_tokens;
    i64 narrow_rows, short_tile_tokens, narrow_tile_tokens, min_run_tiles, max_finished;
    i64 num_short_blocks, num_narrow_blocks, short_blocks[MAX_BLOCKS], narrow_blocks[MAX_BLOCKS];
} tiles;

/* The segments of a part, sorted by level; rows counted from the part's first. */
typedef struct {
    const int32_t *row_begin, *num_rows, *kv_start, *kv_len, *row_pos;
    const i64 *page_begin;
    i64 n, row_0, rows;
} segments;

static i64 num_runs(const tiles *t, i64 blocks) { return max_of(t->num_sms * blocks / t->num_kv_heads, 1); }

/* Positions 0..n in the order of falling keys, equal ones as they come; spare is of n entries. */
static void sort_falling(const i64 *key, i64 n, i64 *order, i64 *spare) {
    for (i64 i = 0; i < n; i++) order[i] = i;
    for (i64 width = 1; width < n; width *= 2) {
        for (i64 low = 0; low < n; low += 2 * width) {
            i64 middle = min_of(low + width, n), high = min_of(low + 2 * width, n), a = low, b = middle;
            for (i64 k = low; k < high; k++)
                spare[k] = b >= high || (a < middle && key[order[a]] >= key[order[b]]) ? order[a++] : order[b++];
        }
        memcpy(order, spare, (size_t)n * sizeof(i64));
    }
}

/* lower._Stream: of the n segments in seg. Arrays of n entries: order, first_run, pieces, and three of scratch; load is
 * of the runs. runs: int32[most runs, FIELDS]. */
static void cut_stream(const tiles *t, const segments *s, i64 tile_tokens, const i64 *blocks, i64 num_blocks,
                       const i64 *seg, i64 n, int may_cut, i64 *order, i64 *first_run, i64 *pieces, i64 *scratch,
                       i64 *load, int32_t *runs) {
    i64 most_runs = num_runs(t, blocks[num_blocks - 1]), total = 0, count = 0, longest = 0;
    i64 *length = scratch, *sorted = scratch + n, *spare = scratch + 2 * n;
    memset(runs, 0, (size_t)(most_runs * FIELDS) * sizeof(int32_t));
    for (i64 i = 0; i < n; i++) {
        length[i] = ceil_div(s->kv_len[seg[i]], tile_tokens);
        total += length[i];
        pieces[i] = 1;
    }
    if (!n) return;
    sort_falling(length, n, sorted, spare);
    for (i64 b = 0; b < num_blocks; b++) {
        i64 wanted = num_runs(t, blocks[b]), most = 0;
        memset(load, 0, (size_t)wanted * sizeof(i64));
        for (i64 rank = 0; rank < n; rank++) {
            i64 turn = rank / wanted, place = rank % wanted, run = turn % 2 ? wanted - 1 - place : place;
            most = max_of(most, load[run] += length[sorted[rank]]);
        }
        if (!count || most * 10 <= longest * 9) longest = most, count = wanted;
    }
    i64 ideal = ceil_div(total, count);
    if (!may_cut || longest <= max_of(ideal + 1, ideal * 5 / 4)) {
        for (i64 rank = 0; rank < n; rank++) {
            i64 turn = rank / count, place = rank % count;
            first_run[sorted[rank]] = turn % 2 ? count - 1 - place : place;
        }
        memset(load, 0, (size_t)(most_runs + 1) * sizeof(i64)); /* items before each run */
        for (i64 i = 0; i < n; i++) {
            load[first_run[i] + 1]++;
            runs[first_run[i] * FIELDS + 4] += (int32_t)length[i];
        }
        for (i64 run = 0; run < most_runs; run++) {
            load[run + 1] += load[run];
            runs[run * FIELDS + 3] = (int32_t)min_of(load[run], n);
        }
        for (i64 i = 0; i < n; i++) order[load[first_run[i]]++] = i;
        return;
    }
    i64 used = min_of(num_runs(t, blocks[0]), ceil_div(total, t->min_run_tiles)), item = 0, end = length[0];
    for (i64 run = 0; run < most_runs; run++) {
        i64 cut = min_of(run, used) * total / used, next = min_of(run + 1, used) * total / used;
        while (end <= cut && item < n - 1) end += length[++item];
        int32_t *of = runs + run * FIELDS;
        of[3] = (int32_t)item;
        of[4] = (int32_t)(next - cut);
        of[5] = (int32_t)((cut - (end - length[item])) * tile_tokens);
    }
    i64 begin = 0, run = 0;
    for (i64 i = 0; i < n; i++) {
        order[i] = i;
        while (run + 1 < used && (run + 1) * total / used <= begin) run++;
        first_run[i] = run;
        i64 last = run, until = begin + length[i];
        while ((last + 1) * total / used < until) last++;
        pieces[i] = last - run + 1;
        begin = until;
    }
}

/* Items of a stream, and the beginning of its runs' records. */
static void write_stream(const segments *s, const i64 *seg, i64 n, const i64 *order, const i64 *first_run,
                         const i64 *above, const i64 *number, const int32_t *partial_indptr, int32_t *items,
                         int32_t *runs, i64 most_runs) {
    for (i64 k = 0; k < n; k++, items += FIELDS) {
        i64 at = seg[order[k]], row = s->row_begin[at] - s->row_0;
        items[0] = (int32_t)row, items[1] = s->num_rows[at], items[2] = (int32_t)s->page_begin[at];
        items[3] = s->kv_len[at], items[4] = partial_indptr[row], items[5] = (int32_t)number[at];
        items[6] = (int32_t)(above[at] - first_run[order[k]]), items[7] = s->kv_start[at];
    }
    memset(items, 0, WINDOW * FIELDS * sizeof(int32_t));
    items -= n * FIELDS;
    for (i64 run = 0; run < most_runs; run++, runs += FIELDS)
        for (int k = 0; k < 3; k++) runs[k] = items[runs[3] * FIELDS + k];
}

/* lower.lower. sizes: i64[3], written: wide, short and narrow items. wide: int32[most, FIELDS]; short and narrow:
 * int32[n + WINDOW, FIELDS]; runs: int32[most runs, FIELDS]; partial_indptr: int32[rows + 1]; combined: int32[rows].
 * Returns 0, or -1 without memory. */
i64 fic_lower(const tiles *t, const segments *s, i64 max_partials, i64 *sizes, int32_t *wide, int32_t *shorts,
              int32_t *short_runs, int32_t *narrow, int32_t *narrow_runs, int32_t *partial_indptr,
              int32_t *combined) {
    i64 n = s->n, per_tile = t->wide_rows / t->group_size, heads = t->num_kv_heads, work = 0, num[3] = {0};
    i64 runs[2] = {num_runs(t, t->short_blocks[t->num_short_blocks - 1]),
                   num_runs(t, t->narrow_blocks[t->num_narrow_blocks - 1])};
    i64 most = max_of(runs[0], runs[1]);
    i64 *memory = malloc((size_t)(18 * n + 2 * s->rows + most + 1) * sizeof(i64));
    if (!memory) return -1;
    i64 *kind = memory, *above = memory + n, *pieces = memory + 2 * n, *chunk = memory + 3 * n, *number = memory + 4 * n;
    i64 *seg[3] = {memory + 5 * n, memory + 6 * n, memory + 7 * n};
    i64 *order[2] = {memory + 8 * n, memory + 9 * n}, *first[2] = {memory + 10 * n, memory + 11 * n};
    i64 *stream = memory + 12 * n, *scratch = memory + 13 * n; /* n entries, and 3 * n */
    i64 *counts = memory + 18 * n, *below = counts + s->rows, *load = below + s->rows;
    for (i64 i = 0; i < n; i++) {
        i64 packed = s->num_rows[i] * t->group_size, length = s->kv_len[i];
        kind[i] = -1, pieces[i] = 0;
        if (!length) continue;
        kind[i] = packed <= t->narrow_rows ? 2 : packed <= t->short_rows && length <= t->short_tokens ? 1 : 0;
        seg[kind[i]][num[kind[i]]++] = i;
        if (!kind[i]) work += ceil_div(s->num_rows[i], per_tile) * length;
    }
    double share = (double)(work * heads) / (double)(t->num_sms * t->wide_blocks), wanted = (double)t->min_cut;
    if (share > wanted) wanted = share;
    for (int may_cut = 1; may_cut >= 0; may_cut--) {
        for (i64 k = 0; k < num[0]; k++) {
            i64 i = seg[0][k], length = s->kv_len[i];
            chunk[i] = length;
            if (may_cut) {
                double cuts = rint((double)length / wanted);
                i64 even = ceil_div(length, cuts > 1.0 ? (i64)cuts : 1);
                chunk[i] = ceil_div(even, t->wide_tokens) * t->wide_tokens;
            }
            pieces[i] = ceil_div(length, chunk[i]);
        }
        for (int which = 0; which < 2; which++) {
            const i64 *blocks = which ? t->narrow_blocks : t->short_blocks;
            cut_stream(t, s, which ? t->narrow_tile_tokens : t->short_tile_tokens, blocks,
                       which ? t->num_narrow_blocks : t->num_short_blocks, seg[1 + which], num[1 + which], may_cut,
                       order[which], first[which], stream, scratch, load, which ? narrow_runs : short_runs);
            for (i64 k = 0; k < num[1 + which]; k++) pieces[seg[1 + which][k]] = stream[k];
        }
        /* Pieces above each segment, the same for all of its rows; below: those of narrow ones alone. */
        memset(counts, 0, (size_t)(2 * s->rows) * sizeof(i64));
        i64 total = 0, *of_narrow = scratch; /* by segment */
        for (i64 i = 0; i < n; i++) {
            i64 row = s->row_begin[i] - s->row_0;
            above[i] = counts[row], of_narrow[i] = below[row];
            if (!pieces[i]) continue;
            for (i64 r = row; r < row + s->num_rows[i]; r++) {
                counts[r] += pieces[i];
                if (kind[i] == 2) below[r] += pieces[i];
            }
        }
        for (i64 r = 0; r < s->rows; r++) combined[r] = counts[r] == 1 ? -1 : (int32_t)counts[r];
        for (i64 i = 0; i < n; i++) number[i] = counts[s->row_begin[i] - s->row_0] == 1;
        if (t->max_finished)
            for (i64 i = 0; i < n; i++) {
                i64 row = s->row_begin[i] - s->row_0;
                if (kind[i] != 2 || pieces[i] != 1 || s->num_rows[i] != 1 || of_narrow[i] || number[i]) continue;
                if (combined[row] - above[i] != 1 || !above[i] || above[i] > t->max_finished) continue;
                number[i] = above[i] + 1;
                counts[row]--;
                combined[row] = -1;
            }
        for (i64 r = 0; r < s->rows; r++) total += counts[r];
        if (max_partials < 0 || total <= max_partials) break;
    }
    partial_indptr[0] = 0;
    for (i64 r = 0; r < s->rows; r++) partial_indptr[r + 1] = partial_indptr[r] + (int32_t)counts[r];
    write_stream(s, seg[1], num[1], order[0], first[0], above, number, partial_indptr, shorts, short_runs, runs[0]);
    write_stream(s, seg[2], num[2], order[1], first[1], above, number, partial_indptr, narrow, narrow_runs, runs[1]);

    /* Wide items: those of a segment piece by piece, tile by tile, then all of them the longest first. */
    i64 items = 0;
    for (i64 k = 0; k < num[0]; k++) items += ceil_div(s->num_rows[seg[0][k]], per_tile) * pieces[seg[0][k]];
    i64 *length = malloc((size_t)(3 * items + 1) * sizeof(i64));
    int32_t *table = malloc((size_t)(items * FIELDS + 1) * sizeof(int32_t));
    if (!length || !table) { free(length); free(table); free(memory); return -1; }
    i64 at = 0;
    for (i64 k = 0; k < num[0]; k++) {
        i64 i = seg[0][k], row = s->row_begin[i] - s->row_0, tiles_of_it = ceil_div(s->num_rows[i], per_tile);
        i64 seen = min_of(s->row_pos[s->row_begin[i]] + 1 - s->kv_start[i], s->kv_len[i]);
        for (i64 piece = 0; piece < pieces[i]; piece++) {
            i64 begin = piece * chunk[i], end = min_of(begin + chunk[i], s->kv_len[i]);
            for (i64 tile = 0; tile < tiles_of_it; tile++, at++) {
                int32_t *item = table + at * FIELDS;
                length[at] = end - begin;
                item[0] = (int32_t)(row + tile * per_tile);
                item[1] = (int32_t)min_of(s->num_rows[i] - tile * per_tile, per_tile);
                item[2] = (int32_t)s->page_begin[i], item[3] = (int32_t)begin, item[4] = (int32_t)end;
                item[5] = (int32_t)min_of(max_of(seen, begin), end);
                item[6] = number[i] == 1 ? -1 : (int32_t)(above[i] + piece);
                item[7] = s->kv_start[i];
            }
        }
    }
    sort_falling(length, items, length + items, length + 2 * items);
    for (i64 k = 0; k < items; k++)
        memcpy(wide + k * FIELDS, table + length[items + k] * FIELDS, FIELDS * sizeof(int32_t));
    sizes[0] = items, sizes[1] = num[1], sizes[2] = num[2];
    free(length); free(table); free(memory);
    return 0;
}
