// verify_attention_invariant: what verify_attention computes, in an order of sums that a row's own path
// alone decides. A token's result has the same bits as a node of any tree, as a row of a prompt and
// as the only row of a step.
//
// A row's path is the keys that it sees in the order of their positions, wherever they lie: behind
// the last known token those of its ancestors. It is cut into segments of 128 keys (twice as many
// from 8,193 on, four times from 16,385, ..: at most 64 of them), a segment into chunks of 32. A
// chunk's scores are one order of products, its weights are relative to the greatest score so far of
// the segment, and its weighted values are added behind the chunks before; merge_invariant adds
// segments in their order. None of this asks what else is in the step.
//
// plan_paths                  who sees what, once for all layers of a step
// plan_units                  which rows read which keys together
// verify_attention_invariant  segments, bf16 on tensor cores (mma.sync), softmax in float32
// merge_invariant             rows of several segments; rows that are padding give 0
//
// An item is up to eight heads of a row: item i is heads 8 (i % E) .. of row i / E, E = ceil(H / 8). A
// launch has items first_item .. + num_items, 128 at most. Neighbours that see the same keys of a
// segment, up to four, are a unit of work: where those lie before all their requests' own rows, or
// the items are of one row.
//
// info        [T] PathInfo; path [T, nodes] int32: positions in the request's pages of the keys from
//             `limit` on, in order
// unit        [launches, 1 + 128 * 64] int32: how many units the launch has, and they, packed
// out         [T, H, C] bf16; query [T, H, C + D] bf16, strides between rows and heads given
// part_value  [items, 64, C / 16, 32] float4, part_norm [items, 64, 8] float2: of a launch's items
// cache       [S, C + D] bf16; page_table [R, pages] int32; lengths and mask as verify_attention's
//
// With `planned`, info, path, unit and page table were there before an earlier launch of this kernel
// passed its wait: they are read while the kernel in front still runs.
//
// Grid of plan_paths: ceil(T / 128) blocks of 128; plan_units: a block of 256 a launch;
// merge_invariant: (items, ceil(C / 128)) blocks of 256; verify_attention_invariant: any number of
// blocks of 256, two to a multiprocessor where memory allows.
// Limits: C a multiple of 64, D of 16; rows of query and cache from 16-byte boundaries on.
// Precision: as verify_attention in bf16.
// Oracle: kernels/reference_attention.py and float64 (tests/gpu/test_verify_attention_invariant.py).

#include "attention_fragment.cuh"
#include "overlap.cuh"
#include "verify_attention_batch.cuh"

#ifndef LATENT  // C
#define LATENT 512
#endif
#ifndef ROPE  // D
#define ROPE 64
#endif

constexpr int SEGMENTS = 64;       // of a path, at most
constexpr int FIRST_SEGMENT = 128;  // keys
constexpr int CHUNK = 32;          // keys
constexpr int STEP = 16;           // keys of a product
constexpr int GROUP = 4;           // items that may share keys
constexpr int ROWS = GROUP * EIGHT;
constexpr int MOST_ITEMS = 128;    // of a launch
constexpr int MOST_UNITS = MOST_ITEMS * SEGMENTS;
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / WARP;
constexpr int ROWS_A_WARP = ROWS / WARPS;
constexpr int PLAN_THREADS = 128;
constexpr int ROW_BYTES = 2 * (LATENT + ROPE);
constexpr int STRIDE = ROW_BYTES + 16;  // an odd number of 16-byte pieces: rows in different banks
constexpr int PIECES = ROW_BYTES / 16;
constexpr int QUERY_STEPS = (LATENT + ROPE) / 16;
constexpr int VALUE_STEPS = LATENT / 16;
constexpr int VALUE_TILES = (VALUE_STEPS + WARPS - 1) / WARPS;  // of 16 dimensions, of a warp
constexpr int SCORE_STRIDE = CHUNK + 4;
constexpr int WEIGHT_STRIDE = 2 * CHUNK + 16;
static_assert(LATENT % 64 == 0 && ROPE % 16 == 0, "dimensions in steps of 16");
static_assert(CHUNK == WARP && CHUNK / STEP * GROUP == WARPS, "a lane a key, a warp a product");
static_assert(THREADS >= FIRST_SEGMENT, "a thread a key");

// What a row sees: `keys` keys, of which the first `limit` lie at their positions and the others
// where `path` says; segments of FIRST_SEGMENT << shift. keys 0: padding.
struct alignas(16) PathInfo {
    int request;
    int limit;
    int keys;
    int shift;

    __device__ int segment() const { return FIRST_SEGMENT << shift; }
    __device__ int segments() const { return (keys + segment() - 1) / segment(); }
};

__device__ __forceinline__ PathInfo load_info(const PathInfo* at) {
    const int4 x = *(const int4*)at;
    return {x.x, x.y, x.z, x.w};
}

extern "C" __global__ void __launch_bounds__(PLAN_THREADS) plan_paths(
    PathInfo* info, int* path, const int* row_start, const int* num_cached, const int* num_known,
    const int* num_nodes, const u32* mask, int num_rows, int num_requests, int pages,
    int page_shift, int nodes, int words) {
    start_behind_previous();
    const int t = blockIdx.x * PLAN_THREADS + threadIdx.x;
    if (t >= num_rows) return;
    // The last request that starts at the row or before it.
    int r = 0;
    for (int last = num_requests; r + 1 < last;) {
        const int middle = (r + last) / 2;
        (row_start[middle] <= t ? r : last) = middle;
    }
    const Batch batch = {row_start, num_cached, num_known, num_nodes, num_requests,
                         1,         pages,      page_shift, nodes};
    PathInfo found = {r, 0, 0, 0};
    const Request request = request_of(batch, r);
    const int row = t - request.first_row;
    if (t < row_start[num_requests] && row < request.rows) {
        found.limit = found.keys = request.cached + min(row + 1, request.known);
        const int node = row - request.known + 1;
        const u32* const bits = mask + ((i64)r * nodes + max(node, 0)) * words;
        for (int word = 0; node > 0 && word <= node / 32; ++word) {
            u32 left = bits[word] & lowest_bits(node + 1 - 32 * word) & (word == 0 ? ~1u : ~0u);
            for (; left != 0; left &= left - 1) {
                const int ancestor = 32 * word + __ffs((int)left) - 1;
                path[(i64)t * nodes + found.keys++ - found.limit] = found.limit - 1 + ancestor;
            }
        }
        while (found.segments() > SEGMENTS) ++found.shift;
    }
    info[t] = found;
}

// Items that see the same keys of a segment.
struct Unit {
    int item;  // of the launch: the first
    int count;
    int segment;

    __device__ static Unit unpacked(int x) { return {x >> 16, x >> 8 & 255, x & 255}; }
    __device__ int packed() const { return item << 16 | count << 8 | segment; }
};

// Whether two rows see the same keys of a segment, each of it whole.
__device__ __forceinline__ bool alike(const PathInfo& a, const PathInfo& b, int segment) {
    return a.request == b.request && a.shift == b.shift &&
           (segment + 1) * a.segment() <= min(a.limit, b.limit);
}

// Units of one segment and one group of neighbours, in their order; counts them where units is null.
__device__ __forceinline__ int units_of(int* units, const PathInfo* info, int first_item,
                                        int num_items, int items_a_row, int group, int segment) {
    int found = 0, count = 0, row_before = -1;
    PathInfo before = {-1, 0, 0, 0};
    for (int i = group * GROUP; i < min(num_items, group * GROUP + GROUP); ++i) {
        const int row = (first_item + i) / items_a_row;
        const PathInfo mine = row == row_before ? before : load_info(info + row);
        if (segment < mine.segments()) {
            const bool joins = count > 0 && (row == row_before || alike(mine, before, segment));
            if (!joins) {
                ++found;
                count = 0;
            }
            ++count;
            if (units) units[found - 1] = Unit{i + 1 - count, count, segment}.packed();
        } else {
            count = 0;
        }
        before = mine;
        row_before = row;
    }
    return found;
}

// Segments one behind the other, so that blocks beside one another read the same keys.
extern "C" __global__ void __launch_bounds__(THREADS) plan_units(int* unit, const PathInfo* info,
                                                                int num_items, int items_a_row) {
    __shared__ int before[THREADS];
    start_behind_previous();
    const int first_item = blockIdx.x * MOST_ITEMS;
    const int items = min(MOST_ITEMS, num_items - first_item);
    const int groups = (items + GROUP - 1) / GROUP, all = groups * SEGMENTS;
    const int share = (all + THREADS - 1) / THREADS;
    const int first = min((int)threadIdx.x * share, all), last = min(first + share, all);
    int mine = 0;
    for (int i = first; i < last; ++i)
        mine += units_of(nullptr, info, first_item, items, items_a_row, i % groups, i / groups);
    before[threadIdx.x] = mine;
    __syncthreads();
    for (int by = 1; by < THREADS; by *= 2) {
        const int added = (int)threadIdx.x >= by ? before[threadIdx.x - by] : 0;
        __syncthreads();
        before[threadIdx.x] += added;
        __syncthreads();
    }
    int* const own = unit + (i64)blockIdx.x * (1 + MOST_UNITS);
    if (threadIdx.x == THREADS - 1) own[0] = before[threadIdx.x];
    int* to = own + 1 + before[threadIdx.x] - mine;
    for (int i = first; i < last; ++i)
        to += units_of(to, info, first_item, items, items_a_row, i % groups, i / groups);
}

struct InvariantShared {
    unsigned char key[CHUNK * STRIDE];
    unsigned char query[ROWS * STRIDE];
    float score[ROWS][SCORE_STRIDE];
    alignas(16) unsigned char weight[ROWS * WEIGHT_STRIDE];
    float factor[ROWS];
    float2 norm[ROWS];
    int slot[FIRST_SEGMENT];
};
#ifdef SHARED_BYTES  // what a launch gives a block
static_assert(sizeof(InvariantShared) <= SHARED_BYTES, "shared");
#endif

struct InvariantAttention {
    u16* out;
    float4* part_value;
    float2* part_norm;
    const PathInfo* info;
    const int* path;
    const unsigned char* query;
    i64 query_row_bytes;
    i64 query_head_bytes;
    const unsigned char* cache;
    i64 cache_row_bytes;
    const int* page_table;
    int first_item;
    int heads;
    int pages;
    int page_shift;
    int nodes;
    float scale;  // times log2 e

    __device__ int items_a_row() const { return (heads + EIGHT - 1) / EIGHT; }
    __device__ int row_of(int item) const { return (first_item + item) / items_a_row(); }
    __device__ int first_head_of(int item) const {
        return (first_item + item) % items_a_row() * EIGHT;
    }
    __device__ int heads_of(int item) const { return min(EIGHT, heads - first_head_of(item)); }
};

struct SegmentBlock {
    InvariantShared& s;
    const InvariantAttention& in;
    const Unit unit;
    const PathInfo info;  // the first item's
    const int begin, end;  // keys
    const int warp, lane;
    float value[VALUE_TILES][GROUP][4];
    float most[ROWS_A_WARP];  // of the warp's rows
    float sum[ROWS_A_WARP];

    __device__ SegmentBlock(InvariantShared& shared, const InvariantAttention& attention, Unit of)
        : s(shared),
          in(attention),
          unit(of),
          info(load_info(attention.info + attention.row_of(of.item))),
          begin(of.segment * info.segment()),
          end(min(begin + info.segment(), info.keys)),
          warp(same_in_warp((int)threadIdx.x / WARP)),
          lane(threadIdx.x % WARP) {
#pragma unroll
        for (int i = 0; i < ROWS_A_WARP; ++i) {
            most[i] = NO_SCORE;
            sum[i] = 0;
        }
#pragma unroll
        for (int m = 0; m < VALUE_TILES; ++m)
#pragma unroll
            for (int n = 0; n < GROUP; ++n)
#pragma unroll
                for (int k = 0; k < 4; ++k) value[m][n][k] = 0;
    }

    __device__ bool has(int m) const { return tile(m) < VALUE_STEPS; }
    __device__ int tile(int m) const { return warp + WARPS * m; }

    // behind: whether the kernel in front has ended.
    __device__ void run(bool behind) {
        find_slots(begin);
        if (!behind) start_behind_previous();
        ask_for_query();
#pragma unroll 1
        for (int first = begin; first < end; first += CHUNK) {
            const int keys = min(CHUNK, end - first);
            const int at = (first - begin) % FIRST_SEGMENT;
            if (at == 0 && first > begin) find_slots(first);
            ask_for_keys(at, keys);
            wait_for_copies();
            __syncthreads();
            score_keys(keys);
            __syncthreads();
            weigh(keys);
            __syncthreads();
            add_values(keys);
            __syncthreads();
        }
        finish();
    }

    // Heads beyond the item's are its last again.
    __device__ void ask_for_query() const {
        const SharedAddress to = shared_address(s.query);
        for (int i = threadIdx.x; i < unit.count * EIGHT * PIECES; i += THREADS) {
            const int row = i / PIECES, piece = i % PIECES, n = row / EIGHT;
            const int item = unit.item + n;
            const int head = in.first_head_of(item) + min(row % EIGHT, in.heads_of(item) - 1);
            copy_async(to + row * STRIDE + 16 * piece,
                       in.query + in.row_of(item) * in.query_row_bytes +
                           head * in.query_head_bytes + 16 * piece,
                       true);
        }
    }

    // Cache rows of the next keys, a thread a key; behind the last key that one again.
    __device__ void find_slots(int first) const {
        if (threadIdx.x < FIRST_SEGMENT) {
            const int key = min(first + (int)threadIdx.x, end - 1), beyond = key - info.limit;
            const int at =
                beyond < 0 ? key : in.path[(i64)in.row_of(unit.item) * in.nodes + beyond];
            const int page = in.page_table[(i64)info.request * in.pages + (at >> in.page_shift)];
            s.slot[threadIdx.x] = (page << in.page_shift) + (at & ((1 << in.page_shift) - 1));
        }
        __syncthreads();
    }

    __device__ void ask_for_keys(int first, int keys) const {
        const SharedAddress to = shared_address(s.key);
        const int whole = (keys + STEP - 1) / STEP * STEP;
        for (int i = threadIdx.x; i < whole * PIECES; i += THREADS) {
            const int key = i / PIECES, piece = i % PIECES;
            copy_async(to + key * STRIDE + 16 * piece,
                       in.cache + s.slot[first + key] * in.cache_row_bytes + 16 * piece, true);
        }
    }

    // A warp has 16 keys by eight rows: keys are A, queries B, two sums in turn.
    __device__ void score_keys(int keys) const {
        const int m = warp % (CHUNK / STEP), n = warp / (CHUNK / STEP);
        if (n >= unit.count || m * STEP >= keys) return;
        const SharedAddress from =
            shared_address(s.key) + (m * STEP + lane % STEP) * STRIDE + lane / STEP * 16;
        const SharedAddress query_from =
            shared_address(s.query) + (n * EIGHT + lane % EIGHT) * STRIDE + lane / EIGHT * 16;
        float sums[2][4] = {};
#pragma unroll 4
        for (int i = 0; i < QUERY_STEPS / 2; ++i) {
            u32 q[4], a[4], b[4];
            load_matrices(q, query_from + 64 * i);
            load_matrices(a, from + 64 * i);
            load_matrices(b, from + 64 * i + 32);
            multiply_add(sums[0], a[0], a[1], a[2], a[3], q[0], q[1]);
            multiply_add(sums[1], b[0], b[1], b[2], b[3], q[2], q[3]);
        }
        if (QUERY_STEPS % 2) {
            u32 q[4], a[4];
            load_matrices(q, shared_address(s.query) + (n * EIGHT + lane % EIGHT) * STRIDE +
                                 32 * (QUERY_STEPS - 1) + lane / EIGHT % 2 * 16);
            load_matrices(a, from + 32 * (QUERY_STEPS - 1));
            multiply_add(sums[0], a[0], a[1], a[2], a[3], q[0], q[1]);
        }
        const int key = m * STEP + lane / 4, row = n * EIGHT + lane % 4 * 2;
#pragma unroll
        for (int k = 0; k < 4; ++k)
            s.score[row + k % 2][key + k / 2 * EIGHT] = (sums[0][k] + sums[1][k]) * in.scale;
    }

    // A warp has four rows, a lane a key of each.
    __device__ void weigh(int keys) {
#pragma unroll
        for (int i = 0; i < ROWS_A_WARP; ++i) {
            const int row = ROWS_A_WARP * warp + i;
            if (row >= unit.count * EIGHT) break;
            const float x = lane < keys ? s.score[row][lane] : NO_SCORE;
            float now = max(most[i], x);
#pragma unroll
            for (int by = WARP / 2; by > 0; by /= 2)
                now = max(now, __shfl_xor_sync(ALL_LANES, now, by));
            const u32 weight = bf16_pair(exp2_fast(x - now), 0);
            float added = bf16_low(weight);
#pragma unroll
            for (int by = WARP / 2; by > 0; by /= 2)
                added += __shfl_xor_sync(ALL_LANES, added, by);
            const float factor = exp2_fast(most[i] - now);
            sum[i] = plus(multiply(sum[i], factor), added);
            most[i] = now;
            *(u16*)(s.weight + row * WEIGHT_STRIDE + 2 * lane) = (u16)weight;
            if (lane == 0) s.factor[row] = factor;
        }
    }

    // A warp has every eighth 16 dimensions: values, turned, are A, weights B.
    __device__ void add_values(int keys) {
#pragma unroll
        for (int n = 0; n < GROUP; ++n) {
            if (n >= unit.count) break;
            const float2 by = *(const float2*)&s.factor[n * EIGHT + lane % 4 * 2];
#pragma unroll
            for (int m = 0; m < VALUE_TILES; ++m)
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    value[m][n][k] = multiply(value[m][n][k], k % 2 ? by.y : by.x);
        }
        const int row = lane / 16 * EIGHT + lane % EIGHT, piece = lane / EIGHT % 2 * 16;
        const SharedAddress weights = shared_address(s.weight) + row * WEIGHT_STRIDE + piece;
        const SharedAddress values = shared_address(s.key) + row * STRIDE + piece + 32 * warp;
#pragma unroll
        for (int step = 0; step < CHUNK / STEP; ++step) {
            if (step * STEP >= keys) break;
            u32 w[GROUP / 2][4];
#pragma unroll
            for (int n = 0; n < GROUP; n += 2)
                if (n < unit.count)
                    load_matrices(w[n / 2], weights + n * EIGHT * WEIGHT_STRIDE + 32 * step);
#pragma unroll
            for (int m = 0; m < VALUE_TILES; ++m) {
                if (!has(m)) continue;
                u32 v[4];
                load_matrices_transposed(v, values + step * STEP * STRIDE + 32 * WARPS * m);
#pragma unroll
                for (int n = 0; n < GROUP; ++n)
                    if (n < unit.count)
                        multiply_add(value[m][n], v[0], v[1], v[2], v[3], w[n / 2][n % 2 * 2],
                                     w[n / 2][n % 2 * 2 + 1]);
            }
        }
    }

    // The result where the segment is all that a row sees, else its part of it.
    __device__ void finish() const {
#pragma unroll
        for (int i = 0; i < ROWS_A_WARP; ++i)
            if (lane == 0) s.norm[ROWS_A_WARP * warp + i] = {most[i], sum[i]};
        __syncthreads();
#pragma unroll
        for (int n = 0; n < GROUP; ++n)
            if (n < unit.count) finish_item(n);
        __syncthreads();  // before the next unit's norms
    }

    __device__ void finish_item(int n) const {
        const int item = unit.item + n, row = in.row_of(item);
        const bool only = load_info(in.info + row).segments() == 1;
        const i64 part = (i64)item * SEGMENTS + unit.segment;
        if (!only && threadIdx.x < EIGHT)
            in.part_norm[part * EIGHT + threadIdx.x] = s.norm[n * EIGHT + threadIdx.x];
        u16* const out = in.out + ((i64)row * in.heads + in.first_head_of(item)) * LATENT;
        const float2* const norm = s.norm + n * EIGHT + lane % 4 * 2;
        const float by[2] = {divide(1.0f, norm[0].y), divide(1.0f, norm[1].y)};
#pragma unroll
        for (int m = 0; m < VALUE_TILES; ++m) {
            if (!has(m)) continue;
            const float(&x)[4] = value[m][n];
            if (only)
                write_fragment<LATENT>(out + 16 * tile(m), in.heads_of(item),
                                       {multiply(x[0], by[0]), multiply(x[1], by[1]),
                                        multiply(x[2], by[0]), multiply(x[3], by[1])});
            else
                in.part_value[(part * VALUE_STEPS + tile(m)) * WARP + lane] = {x[0], x[1], x[2],
                                                                              x[3]};
        }
    }
};

extern __shared__ __align__(128) unsigned char memory[];

extern "C" __global__ void __launch_bounds__(THREADS, 2) verify_attention_invariant(
    u16* out, float4* part_value, float2* part_norm, const PathInfo* info, const int* path,
    const int* unit, const unsigned char* query, const unsigned char* cache,
    const int* page_table, i64 query_row_stride, i64 query_head_stride, i64 cache_row_stride,
    int first_item, int heads, int pages, int page_shift, int nodes, float scale, int planned) {
    InvariantShared& s = *(InvariantShared*)memory;
    const InvariantAttention in = {out,
                                   part_value,
                                   part_norm,
                                   info,
                                   path,
                                   query,
                                   2 * query_row_stride,
                                   2 * query_head_stride,
                                   cache,
                                   2 * cache_row_stride,
                                   page_table,
                                   first_item,
                                   heads,
                                   pages,
                                   page_shift,
                                   nodes,
                                   scale};
    bool behind = !planned;
    if (behind) start_behind_previous();
    const int* const own = unit + (i64)(first_item / MOST_ITEMS) * (1 + MOST_UNITS);
    const int units = own[0];
#pragma unroll 1
    for (int u = blockIdx.x; u < units; u += gridDim.x) {
        SegmentBlock(s, in, Unit::unpacked(own[1 + u])).run(behind);
        behind = true;
    }
    if (!behind) start_behind_previous();
}

extern "C" __global__ void __launch_bounds__(THREADS) merge_invariant(
    u16* out, const float4* part_value, const float2* part_norm, const PathInfo* info,
    int first_item, int heads) {
    __shared__ float share[EIGHT][SEGMENTS];
    start_behind_previous();
    const int items = (heads + EIGHT - 1) / EIGHT, global = first_item + blockIdx.x;
    const int row = global / items, first = global % items * EIGHT;
    const int segments = load_info(info + row).segments();
    if (segments == 1) return;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u16* const to = out + ((i64)row * heads + first) * LATENT;
    if (segments > 0) {
        const float2* const norm = part_norm + (i64)blockIdx.x * SEGMENTS * EIGHT + warp;
        const bool has_low = lane < segments, has_high = lane + WARP < segments;
        const float2 low = has_low ? norm[lane * EIGHT] : float2{NO_SCORE, 0};
        const float2 high = has_high ? norm[(lane + WARP) * EIGHT] : float2{NO_SCORE, 0};
        float most = max(low.x, high.x);
#pragma unroll
        for (int by = WARP / 2; by > 0; by /= 2)
            most = max(most, __shfl_xor_sync(ALL_LANES, most, by));
        const float of_low = exp2_fast(low.x - most), of_high = exp2_fast(high.x - most);
        float sum = plus(multiply(of_low, low.y), multiply(of_high, high.y));
#pragma unroll
        for (int by = WARP / 2; by > 0; by /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, by);
        share[warp][lane] = divide(of_low, sum);
        share[warp][lane + WARP] = divide(of_high, sum);
        __syncthreads();
    }
    const int tile = warp + WARPS * blockIdx.y;
    if (tile >= VALUE_STEPS) return;
    const float4* from =
        part_value + ((i64)blockIdx.x * SEGMENTS * VALUE_STEPS + tile) * WARP + lane;
    const float *const a = share[lane % 4 * 2], *const b = share[lane % 4 * 2 + 1];
    float4 sum = {0, 0, 0, 0};
#pragma unroll 8
    for (int i = 0; i < segments; ++i, from += VALUE_STEPS * WARP) {
        const float4 x = *from;
        sum.x = fmaf(x.x, a[i], sum.x);
        sum.y = fmaf(x.y, b[i], sum.y);
        sum.z = fmaf(x.z, a[i], sum.z);
        sum.w = fmaf(x.w, b[i], sum.w);
    }
    write_fragment<LATENT>(to + 16 * tile, min(EIGHT, heads - first), sum);
}
