// What moe_w4a16_many multiplies, on its way to shared memory: each warp's weights by the copy engine
// through a ring of its own, a tile's rows by all threads through one ring of the block.
#pragma once

#include "moe_w4a16_many_units.cuh"

constexpr int WEIGHT_SLOTS = 6, ROW_SLOTS = 5;
constexpr int WEIGHT_BYTES = STAGE_STEPS * STEP_BYTES;  // of a slot
constexpr int ROW_BYTES = 2 * STEP;                     // of a row, a step
// A step's rows lie side by side, so that 8 of them, a lane's 16 bytes each, are 512 bytes without
// a bank used twice; the other step's lie half a line further, so that a copied row fills a line.
constexpr int STEP_ROWS_BYTES = ROWS * ROW_BYTES + ROW_BYTES;

struct Stage {
    unsigned char step[STAGE_STEPS][STEP_ROWS_BYTES];
};

#ifdef __CUDACC__

// L2 keeps what is read again (rows) rather than what is read once (weights).
__device__ __forceinline__ u64 read_once()
{
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ void copy_run_async(SharedAddress to, const void* from, u32 bytes,
                                               SharedAddress barrier, u64 policy)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

#else

inline u64 read_once() { return 0; }
inline void copy_run_async(SharedAddress to, const void* from, u32 bytes, SharedAddress barrier, u64)
{
    copy_run_async(to, from, bytes, barrier);
}

#endif

// One warp's 32 outputs of each unit, stage by stage. A unit in which it has none takes no slots.
template <bool UP>
struct WeightRing {
    using P = Product<UP>;
    const Units<UP>& units;
    const unsigned char* weights;
    SharedAddress slots, landed;
    u64 policy;
    const unsigned char* from;
    Cursor<UP> ahead;
    int oldest, parity;

    __device__ void open(unsigned char (*memory)[WEIGHT_BYTES], u64* barriers)
    {
        slots = same_in_warp(shared_address(memory));
        landed = same_in_warp(shared_address(barriers));
        policy = read_once();
        oldest = 0;
        parity = 1;  // until each slot has been filled once
        if (lane_id() == 0) {
            for (int i = 0; i < WEIGHT_SLOTS; ++i) barrier_init(landed + 8 * i, 1);
            order_before_copies();
        }
        __syncwarp();
    }
    __device__ void fill()
    {
        ahead.open();
        enter();
#pragma unroll 1
        for (int i = 0; i < WEIGHT_SLOTS; ++i) bring_next();
    }
    __device__ int group(int unit) const
    {
        return units.slice(unit) * WARPS + same_in_warp((int)threadIdx.x / WARP);
    }
    // A stage, if there is one more, to where the oldest was, which all lanes have read.
    __device__ void bring_next()
    {
        if (ahead.there(units)) {
            const int bytes = P::steps(ahead.stage) * STEP_BYTES;
            if (lane_id() == 0) {
                barrier_arrive_expecting(landed + 8 * oldest, bytes);
                copy_run_async(slots + WEIGHT_BYTES * oldest, from, bytes, landed + 8 * oldest,
                               policy);
            }
            from += bytes;
            if (ahead.advance()) enter();
        }
        if (++oldest == WEIGHT_SLOTS) {
            oldest = 0;
            parity ^= 1;
        }
    }
    // Until the oldest stage has landed.
    __device__ void wait() const { barrier_wait(landed + 8 * oldest, parity); }
    __device__ Weights step(int i) const
    {
        const SharedAddress at = slots + WEIGHT_BYTES * oldest + i * STEP_BYTES;
        return {shared_vector(at + 16 * lane_id()),
                load_two(at + SCALES_AT + lane_id() / 4 * 8)};
    }
    // The warp has read all of the oldest.
    __device__ void give_back()
    {
        __syncwarp();
        bring_next();
    }

private:
    __device__ void enter()
    {
        if (!P::ALL_WARPS)
            while (ahead.there(units) && group(ahead.unit) >= P::GROUPS)
                ahead.unit = ahead.next_unit();
        if (!ahead.there(units)) return;
        const i64 expert = units.tile(ahead.unit).expert();
        from = weights + (expert * P::GROUPS + group(ahead.unit)) * P::STEPS * STEP_BYTES;
    }
};

// The rows of each unit's tile, stage by stage, ROW_SLOTS - 1 stages ahead. Rows that are not there
// leave their places as they were: nobody looks at what comes of them.
template <bool UP>
struct RowRing {
    using P = Product<UP>;
    static constexpr int LINES = STAGE_STEPS * ROW_BYTES / 16;  // of a row, a stage
    static constexpr int EACH = ROWS * LINES / THREADS;         // rows of a thread
    const Units<UP>& units;
    const u16* source;
    const int* sorted;  // pairs; of the down product null, whose rows lie in their order
    SharedAddress slots;
    Cursor<UP> ahead;
    int at[EACH];  // where in the source a row's next numbers are for this thread, or -1
    int slot;

    __device__ void open(Stage* memory)
    {
        slots = same_in_warp(shared_address(memory));
        slot = 0;
        ahead.open();
        enter();
#pragma unroll 1
        for (int i = 0; i < ROW_SLOTS - 1; ++i) bring_next();
    }
    // A stage, if there is one more, as a group of this thread's copies.
    __device__ void bring_next()
    {
        if (ahead.there(units)) {
            const int step = line() / (ROW_BYTES / 16);
            const SharedAddress to = slots + slot * (int)sizeof(Stage) + step * STEP_ROWS_BYTES +
                                     row() * ROW_BYTES + line() % (ROW_BYTES / 16) * 16;
            const bool there = step < P::steps(ahead.stage);
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (at[i] < 0) continue;
                if (there) copy_async(to + i * (ROWS / EACH) * ROW_BYTES, source + at[i], true);
                at[i] += STAGE_STEPS * STEP;
            }
            if (ahead.advance()) enter();
        }
        end_group();
        if (++slot == ROW_SLOTS) slot = 0;
    }

private:
    __device__ static int row() { return (int)threadIdx.x / LINES; }
    __device__ static int line() { return (int)threadIdx.x % LINES; }

    __device__ void enter()
    {
        if (!ahead.there(units)) return;
        const Tile tile = units.tile(ahead.unit);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const int own = row() + i * (ROWS / EACH), place = tile.first() + own;
            at[i] = -1;
            if (own >= tile.count()) continue;
            at[i] = (UP ? sorted[place] / TOP_K : place) * P::INPUTS + line() * 8;
        }
    }
};
