// plan_paths: the paths of a batch's rows for verify_attention_invariant, and which rows read which keys
// together; once for all layers of a step.
//
// plan_paths   who sees what
// plan_units   units of work: neighbours that see the same keys of a segment, up to four items, where
//              those lie before all their requests' own rows or the items are of one row
//
// info        [T] PathInfo; path [T, nodes] int32: positions in the request's pages of the keys from
//             `limit` on, in order
// unit        [launches, 1 + 128 * 64] int32: how many units the launch has, and they, packed
// row_start, num_cached, num_known, num_nodes, mask   as verify_attention's
//
// Grid of plan_paths: ceil(T / 128) blocks of 128; plan_units: a block of 256 a launch of attention.
// For a fixed batch the result is fixed; it changes no sum, only what is read once for several rows.
// Oracle: tests/kernels/attention_cases.py says who sees what, key by key.

#include "overlap.cuh"
#include "verify_attention_paths.cuh"

constexpr int PATH_THREADS = 128;
constexpr int UNIT_THREADS = 256;

extern "C" __global__ void __launch_bounds__(PATH_THREADS) plan_paths(
    PathInfo* info, int* path, const int* row_start, const int* num_cached, const int* num_known,
    const int* num_nodes, const u32* mask, int num_rows, int num_requests, int pages,
    int page_shift, int nodes, int words) {
    start_behind_previous();
    const int t = blockIdx.x * PATH_THREADS + threadIdx.x;
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
extern "C" __global__ void __launch_bounds__(UNIT_THREADS) plan_units(int* unit, const PathInfo* info,
                                                                int num_items, int items_a_row) {
    __shared__ int before[UNIT_THREADS];
    start_behind_previous();
    const int first_item = blockIdx.x * MOST_ITEMS;
    const int items = min(MOST_ITEMS, num_items - first_item);
    const int groups = (items + GROUP - 1) / GROUP, all = groups * SEGMENTS;
    const int share = (all + UNIT_THREADS - 1) / UNIT_THREADS;
    const int first = min((int)threadIdx.x * share, all), last = min(first + share, all);
    int mine = 0;
    for (int i = first; i < last; ++i)
        mine += units_of(nullptr, info, first_item, items, items_a_row, i % groups, i / groups);
    before[threadIdx.x] = mine;
    __syncthreads();
    for (int by = 1; by < UNIT_THREADS; by *= 2) {
        const int added = (int)threadIdx.x >= by ? before[threadIdx.x - by] : 0;
        __syncthreads();
        before[threadIdx.x] += added;
        __syncthreads();
    }
    int* const own = unit + (i64)blockIdx.x * (1 + MOST_UNITS);
    if (threadIdx.x == UNIT_THREADS - 1) own[0] = before[threadIdx.x];
    int* to = own + 1 + before[threadIdx.x] - mine;
    for (int i = first; i < last; ++i)
        to += units_of(to, info, first_item, items, items_a_row, i % groups, i / groups);
}
