// The K best of a block's row in topk_logprob.cu: the first bound, the ranking of what the warps
// listed, and the merge of a row's pieces.
#pragma once

#include "topk_survivors.cuh"

// A bound for the first segment, from the whole block: the K-th largest of GROUPS maxima, reached
// by at least K logits. As a key that equal values pass.
__device__ __forceinline__ u64 first_bound(Shared& s, float most) {
    const u32 t = threadIdx.x, part = t % GROUP, mine = t / GROUP;
#pragma unroll
    for (int step = 1; step < GROUP; step *= 2)
        most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, step));
    if (part == 0) s.group_max[mine] = most;
    __syncthreads();
    int rank = 0;
#pragma unroll 4
    for (int round = 0; round < GROUPS / GROUP; ++round) {
        const u32 i = round * GROUP + part;
        const float other = s.group_max[i];
        rank += i < mine ? other >= most : other > most;
    }
#pragma unroll
    for (int step = 1; step < GROUP; step *= 2)
        rank += __shfl_xor_sync(ALL_LANES, rank, step);
    if (part == 0 && rank == K - 1) s.first_bound = most;
    __syncthreads();
    const float bound = s.first_bound;
    return bound == -infinity() ? NO_KEY : (u64)ordered(bound + 0.0f) << 32;
}

// The K best of keys[0 .. size) into s.best, in order, by counting: 8 threads a key. Keys are
// distinct. Ends with a barrier.
__device__ __forceinline__ void rank_keys(Shared& s, const u64* keys, int size) {
    constexpr int PER_KEY = 8, AT_ONCE = THREADS / PER_KEY;
    const int part = threadIdx.x % PER_KEY;
#pragma unroll 1
    for (int base = 0; base < size; base += AT_ONCE) {
        const int i = base + threadIdx.x / PER_KEY;
        const u64 mine = i < size ? keys[i] : ~0ull;
        int rank = 0;
#pragma unroll 4
        for (int j = part; j < size; j += PER_KEY) rank += keys[j] > mine;
#pragma unroll
        for (int step = 1; step < PER_KEY; step *= 2)
            rank += __shfl_xor_sync(ALL_LANES, rank, step);
        if (part == 0 && i < size && rank < K) s.best[rank] = mine;
    }
    if (threadIdx.x >= size && threadIdx.x < K) s.best[threadIdx.x] = NO_KEY;
    if (threadIdx.x == 0) s.num_best = size < K ? size : K;
    __syncthreads();
}

// Ranks all that the warps have listed together with the best so far, and empties the lists.
// All threads of the block. The K-th best is the new bound of all warps: the keys that vouch for
// their own bounds are among those ranked.
__device__ __forceinline__ u64 rank_lists(Shared& s) {
    __syncthreads();
    const int warp = warp_id(), num_best = s.num_best;
    int offset = num_best, size = num_best;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const int count = s.count[w];
        size += count;
        if (w < warp) offset += count;
    }
    if (threadIdx.x < num_best) s.staged[threadIdx.x] = s.best[threadIdx.x];
#pragma unroll 1
    for (int i = lane_id(); i < s.count[warp]; i += WARP) s.staged[offset + i] = s.list[warp][i];
    __syncthreads();
    if (lane_id() == 0) s.count[warp] = 0;
    rank_keys(s, s.staged, size);
    return s.best[K - 1];
}

struct Workspace {
    int* ticket;     // [rows], zero between launches
    u64* keys;       // [rows + blocks, K]: of block b's piece of row r, the list r + b
    UnitSum* units;  // [rows, units]
};

// The blocks that share a row.
struct Sharers {
    int first, count;
};

// Hands a piece's K best to the last block of the row; true in all threads of that one.
__device__ __forceinline__ bool publish(Shared& s, const Workspace& work, int row, int count) {
    if (threadIdx.x < K)
        work.keys[((i64)row + blockIdx.x) * K + threadIdx.x] = s.best[threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
        // The barrier brought the block's stores here; the release shows them to all.
        s.is_last = add_acquire_release(&work.ticket[row], 1) == count - 1;
        if (s.is_last) work.ticket[row] = 0;
    }
    __syncthreads();
    return s.is_last;
}

// The K best of all pieces into s.best, their units' sums into s.units. The filter: where every
// piece shows its q-th best, the m-th largest of those is reached by m * q >= K keys.
__device__ __forceinline__ void merge_pieces(Shared& s, const Workspace& work, int row,
                                             const Sharers& sharers, int num_units) {
    const int pieces = sharers.count, size = pieces * K, lane = lane_id();
    static_assert(MAX_UNITS == THREADS && sizeof(UnitSum) == sizeof(int2), "a unit a thread");
    if (threadIdx.x < num_units) {
        const i64 i = (i64)row * num_units + threadIdx.x;
        const int2 unit = load_shared_by_blocks((const int2*)work.units + i);
        s.units[threadIdx.x] = {float_of((u32)unit.x), float_of((u32)unit.y)};
    }
    static_assert(MAX_PIECE_KEYS == 2 * THREADS, "two keys a thread");
    const u64* const keys = work.keys + ((i64)row + sharers.first) * K;
#pragma unroll
    for (int i = threadIdx.x; i < MAX_PIECE_KEYS; i += THREADS)
        if (i < size) s.staged[i] = load_shared_by_blocks(keys + i);
    __syncthreads();
    // The least q with q * pieces >= K and the least m with m * q >= K, without a division.
    const int q = 1 + __popc(__ballot_sync(ALL_LANES, (lane + 1) * pieces < K));
    const int m = __popc(__ballot_sync(ALL_LANES, lane * q < K));
    const u64 shown = lane < pieces ? s.staged[lane * K + q - 1] : NO_KEY;
    int rank = lane < pieces ? 0 : WARP;
#pragma unroll 4
    for (int i = 0; i < pieces; ++i) {
        const u64 other = s.staged[i * K + q - 1];
        rank += other > shown || (other == shown && i < lane);
    }
    const u32 chosen = __ballot_sync(ALL_LANES, rank == m - 1);
    const u64 bound = __shfl_sync(ALL_LANES, shown, __ffs(chosen) - 1);
    u64* kept = s.list[0];  // the lists are empty and lie in a row
#pragma unroll 1
    for (int base = 0; base < size; base += THREADS) {
        const int i = base + threadIdx.x;
        const u64 key = i < size ? s.staged[i] : NO_KEY;
        const bool keep = key != NO_KEY && key >= bound;
        const u32 keepers = __ballot_sync(ALL_LANES, keep);
        int slot = 0;
        if (lane == 0 && keepers) slot = atomicAdd(&s.count[0], __popc(keepers));
        slot = __shfl_sync(ALL_LANES, slot, 0) + __popc(keepers & ((1u << lane) - 1));
        if (keep) kept[slot] = key;
    }
    __syncthreads();
    rank_keys(s, kept, s.count[0]);
}
