// The sums of the first half, of which each warp has a part, on their way to `inner`.
#pragma once

#include "moe_w4a16_units.cuh"

// Where the warps of a block meet: barriers of PARTS buffers, and how many have added up.
struct Meeting {
    u64 full[PARTS], free[PARTS];
    u32 adders_done, second, unused[2];  // `second` is moe_w4a16_few's: whose turn it is
};
constexpr int FREE_AT = 8 * PARTS, DONE_AT = 16 * PARTS;

// Where what is added up goes, whose readers look at counters.
struct CountedInner {
    static constexpr bool COUNTED = true;
    u16* rows;
    int* ready;

    __device__ void put(int pair, int column, u16 value) const
    {
        rows[(i64)pair * INNER + column] = value;
    }
    __device__ void complete(const Unit& unit) const { arrive(counter_of(ready, unit)); }
};

// Adds up the parts, a column tile a round; rounds take turns at PARTS buffers. Four warps add up,
// each time others, and the rest go on at once: a barrier completes a phase when all have written a
// buffer (`full`), another when those that add it up have read it (`free`).
template <class Inner>
struct Adder {
    float (*part)[WARPS][8][WARP];
    SharedAddress full;
    Inner inner;
    u32 round;

    // The whole block is to meet before the first round.
    __device__ void open(Meeting& meeting)
    {
        full = shared_address(&meeting);
        round = 0;
        if (threadIdx.x != 0) return;
        meeting.adders_done = 0;
        for (int i = 0; i < PARTS; ++i) {
            barrier_init(full + 8 * i, WARPS);
            barrier_init(full + FREE_AT + 8 * i, ADDERS);
        }
    }

    // Until the next round's buffer has been read.
    __device__ void wait_until_free() const
    {
        barrier_wait(full + FREE_AT + 8 * (round % PARTS), (int)(round / PARTS % 2) ^ 1);
    }

    // To be called by all warps of the block, each when it comes to it.
    template <class Units>
    __device__ void add_up(const Units& units, const Unit& unit, const Sums& sum)
    {
#pragma unroll
        for (int j = 0; j < COLUMN_TILES; ++j, ++round) {
            const int warp = threadIdx.x / WARP, lane = lane_id();
            const int buffer = (int)(round % PARTS), parity = (int)(round / PARTS % 2);
            float(*const own)[WARP] = part[buffer][warp];
            wait_until_free();
#pragma unroll
            for (int i = 0; i < 8; ++i) own[i][lane] = sum[j][i / 4][i % 4];
            __syncwarp();
            if (lane == 0) barrier_arrive(full + 8 * buffer);
            // One adds c[i] of both fragments: a column's gate, and its up.
            const int i = (warp - (int)(round * ADDERS % WARPS) + WARPS) % WARPS;
            if (i >= ADDERS) continue;
            barrier_wait(full + 8 * buffer, parity);
            const Both both = sum_of_parts(part[buffer], i);
            __syncwarp();
            if (lane == 0) barrier_arrive(full + FREE_AT + 8 * buffer);
            const int pair = units.pairs(unit).at(j, lane % 4 * 2 + i % 2);
            if (pair >= 0)
                inner.put(pair, unit.part * SLICE + lane / 4 * 2 + i / 2,
                          (u16)bf16_pair(silu(both.gate) * both.up, 0.0f));
            if (!Inner::COUNTED) continue;
            __syncwarp();
            // The last of a unit's last adders tells of it all: they wait for all others' part of a
            // round, which these give when they are done with the rounds before.
            if (j + 1 == COLUMN_TILES && lane == 0 && count_in_block(full + DONE_AT) % ADDERS == ADDERS - 1)
                inner.complete(unit);
        }
    }

private:
    struct Both {
        float gate, up;
    };
    __device__ static Both sum_of_parts(const float (*parts)[8][WARP], int i)
    {
        const int lane = lane_id();
        Both sum{parts[0][i][lane], parts[0][4 + i][lane]};
#pragma unroll
        for (int w = 1; w < SHARES; ++w) {
            sum.gate += parts[w][i][lane];
            sum.up += parts[w][4 + i][lane];
        }
        return sum;
    }
};
