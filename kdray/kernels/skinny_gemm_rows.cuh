// How rows of x come in for skinny_gemm.cu: few of them by the copy engine, for the whole block at
// once; many by all lanes, for each run of inputs by itself.
#pragma once

#include "skinny_gemm_stream.cuh"

// Few rows: two buffers of LENGTH steps for each of the block's RUNS, filled by the copy engine. A
// lane's copies go out one after another, so the WARPS that share a run take turns at its tokens. A
// barrier a buffer waits for all runs. Rows lie behind one another, so LENGTH is odd: neighbours are
// in different halves of the banks.
template <int TOKENS, int WARPS, int RUNS, int LENGTH>
struct RowBuffers {
    static constexpr int ROW_BYTES = LENGTH * 64;
    static_assert(LENGTH % 2 == 1, "rows of x must lie in different halves of the banks");

    const u16* x;          // the lane's first row, the run's first step
    int next_row;          // WARP * WARPS tokens on, in numbers
    int tokens;            // rows there are, and room for
    int steps;             // of the run
    u32 member, run;       // the warp's place
    SharedAddress landed;  // two barriers
    SharedAddress base;

    __device__ SharedAddress buffer(int chunk) const
    {
        return base + (chunk % 2 * RUNS + run) * tokens * ROW_BYTES;
    }
    // Of the lane.
    __device__ int first_row() const { return lane_id() * WARPS + member; }
    // All threads. Nobody reads what was in the buffer any more.
    __device__ void bring(u32 chunk) const
    {
        const SharedAddress barrier = landed + chunk % 2 * 8;
        const int bytes = max(0, min(steps - (int)chunk * LENGTH, LENGTH)) * 64;
        if (member == 0 && lane_id() == 0) barrier_arrive_expecting(barrier, tokens * bytes);
        if (bytes == 0) return;
        const SharedAddress to = buffer(chunk) + first_row() * ROW_BYTES;
        const u16* const from = x + chunk * LENGTH * 32;
        constexpr int APART = WARP * WARPS;
#pragma unroll
        for (int i = 0; i < (TOKENS + APART - 1) / APART; ++i)
            if (first_row() + i * APART < tokens)
                copy_run_async(to + i * APART * ROW_BYTES, from + i * next_row, bytes, barrier);
    }
    __device__ void wait(u32 chunk) const { barrier_wait(landed + chunk % 2 * 8, chunk / 2 % 2); }
};

// Many rows: a ring of BUFFERS chunks of LENGTH steps, which the WARPS that share a run fill and
// read by themselves. Step by step, rows of 64 bytes lie behind one another, which is free of bank
// conflicts. Each chunk has two barriers: all threads have landed their pieces, all warps have read
// it. A chunk is asked for in place of the one before the last, so that nobody waits for the
// slowest warp but one that is a chunk ahead of it.
//
// A barrier learns of a thread's copies when all that it has started before have landed, weights
// too: so pieces are asked for ahead of the weights of later steps.
template <int TOKENS, int WARPS, int LENGTH>
struct RowRing {
    static constexpr int BUFFERS = 4;
    static constexpr int TEAM = WARP * WARPS;
    static constexpr int STEP_BYTES = TOKENS * 64;
    static constexpr int PIECES = LENGTH * TOKENS * 4;  // of 16 bytes, a chunk
    static constexpr int EACH = (PIECES + TEAM - 1) / TEAM;
    static constexpr int BYTES = BUFFERS * LENGTH * STEP_BYTES;
    static constexpr int BARRIERS = 2 * BUFFERS;  // landed, then read
    static_assert((TOKENS & (TOKENS - 1)) == 0 && (TEAM & (TEAM - 1)) == 0, "powers of two");

    const u16* x;  // the first row, the run's first step
    int row;       // numbers from one to the next
    int tokens;
    int steps;              // of the run
    SharedAddress base;     // of the run's ring
    SharedAddress barrier;  // of the run's

    __device__ SharedAddress landed(u32 chunk) const { return barrier + chunk % BUFFERS * 8; }
    __device__ SharedAddress read(u32 chunk) const { return landed(chunk) + BUFFERS * 8; }

    // One thread.
    __device__ void open() const
    {
#pragma unroll
        for (int i = 0; i < BUFFERS; ++i) {
            barrier_init(landed(i), TEAM);
            barrier_init(read(i), WARPS);
        }
    }
    // The first chunks: one through registers where they are few, to be there whatever weights are
    // on their way.
    __device__ void fill() const
    {
        constexpr bool AT_ONCE = EACH <= 4;
#pragma unroll 1
        for (int chunk = AT_ONCE ? 1 : 0; chunk < BUFFERS - 1; ++chunk) bring(chunk);
        if (!AT_ONCE) return;
        const u32 own = member();
        uint4 piece[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (there(own, 0, i)) piece[i] = *(const uint4*)source(own, 0, i);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (there(own, 0, i)) store_shared_vector(target(own, 0, i), piece[i]);
        barrier_arrive(landed(0));
    }
    __device__ void wait(u32 chunk) const { barrier_wait(landed(chunk), chunk / BUFFERS % 2); }
    // The warp has read a chunk.
    __device__ void pass(u32 chunk) const
    {
        __syncwarp();
        if (lane_id() == 0) barrier_arrive(read(chunk));
        const u32 next = chunk + BUFFERS - 1;
        if (next * LENGTH >= steps) return;
        if (chunk > 0) barrier_wait(read(chunk - 1), (chunk - 1) / BUFFERS % 2);
        bring(next);
    }
    __device__ SharedAddress at(int step) const
    {
        return base + step % (BUFFERS * LENGTH) * STEP_BYTES;
    }

private:
    // The thread, among those of the run: asked for each time, or all that follows from it would
    // keep registers that sums need.
    __device__ static u32 member() { return fresh_thread() % TEAM; }
    // Piece i of a thread: threads go over parts of a row, then rows, then steps.
    __device__ static int row_of(u32 own, int i) { return own / 4 % TOKENS + i * (TEAM / 4) % TOKENS; }
    __device__ static int step_of(u32 own, int i)
    {
        return own / (4 * TOKENS) + i * TEAM / (4 * TOKENS);
    }
    __device__ bool there(u32 own, u32 chunk, int i) const
    {
        const int step = step_of(own, i);
        return row_of(own, i) < tokens && step < LENGTH && (int)(chunk * LENGTH) + step < steps;
    }
    __device__ const u16* source(u32 own, u32 chunk, int i) const
    {
        const u32 step = chunk * LENGTH + step_of(own, i);
        return x + (i64)row_of(own, i) * row + step * 32 + own % 4 * 8;
    }
    __device__ SharedAddress target(u32 own, u32 chunk, int i) const
    {
        return at(chunk * LENGTH) + (own + i * TEAM) * 16;
    }
    __device__ void bring(u32 chunk) const
    {
        const u32 own = member();
#pragma unroll 4
        for (int i = 0; i < EACH; ++i)
            if (there(own, chunk, i))
                copy_line_async(target(own, chunk, i), source(own, chunk, i));
        barrier_arrive_after_copies(landed(chunk));
    }
};
