// A warp's 32 outputs by a tile's rows: sums in registers, rows and what -136 times them gives from
// shared memory.
#pragma once

#include "moe_w4a16_many_copies.cuh"

struct Shared {
    Stage rows[ROW_SLOTS];
    unsigned char weights[WARPS][WEIGHT_SLOTS][WEIGHT_BYTES];
    float base[2][STAGE_STEPS][ROWS];
    u64 landed[WARPS][WEIGHT_SLOTS];
    u32 tiles[LISTED_TILES];
};
static_assert(sizeof(Shared) == SHARED_BYTES, "as launched");

// Sums of 32 outputs by 8 rows a row tile: sum[j][m][i] is fragment m's c[i] (mma.cuh).
typedef float Sums[ROW_TILES][2][4];

// Some eights of rows, as a lane multiplies them: inputs, and what -136 times all of them gives.
template <int EIGHTS>
struct Rows {
    uint4 b[EIGHTS];
    uint2 base[EIGHTS];

    __device__ void load(SharedAddress rows, SharedAddress bases, int first)
    {
#pragma unroll
        for (int j = 0; j < EIGHTS; ++j) {
            b[j] = shared_vector(rows + (first + j) * 8 * ROW_BYTES);
            base[j] = load_two(bases + (first + j) * 8 * (int)sizeof(float));
        }
    }
};

// part += one step's 32 outputs for `count` rows, MOST eights or fewer. `rows` and `bases` are the
// lane's of the first eight. That the next EIGHTS might not be there keeps the compiler from having more of
// them under way than there are registers for.
template <int MOST, int EIGHTS>
__device__ __forceinline__ void multiply_step(Sums& part, const Weights& w, int count,
                                              SharedAddress rows, SharedAddress bases)
{
    const Fragment weights[2][2] = {{unpacked(w.q.x), unpacked(w.q.y)},
                                    {unpacked(w.q.z), unpacked(w.q.w)}};
    const float scale[2][2] = {{bf16_low(w.scale.x), bf16_high(w.scale.x)},
                               {bf16_low(w.scale.y), bf16_high(w.scale.y)}};
#pragma unroll
    for (int i = 0; i < MOST; i += EIGHTS) {
        if (i > 0 && count <= 8 * i) break;
        Rows<EIGHTS> now;
        now.load(rows, bases, i);
#pragma unroll
        for (int j = 0; j < EIGHTS; ++j)
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                const float even = float_of(now.base[j].x), odd = float_of(now.base[j].y);
                float c[4] = {even, odd, even, odd};
                multiply_add(c, weights[m][0], now.b[j].x, now.b[j].y);
                multiply_add(c, weights[m][1], now.b[j].z, now.b[j].w);
#pragma unroll
                for (int k = 0; k < 4; ++k) part[i + j][m][k] += c[k] * scale[m][k / 2];
            }
    }
}

template <bool UP>
struct Multiplier {
    using P = Product<UP>;
    static constexpr bool WHOLE_SHARES = P::SHARE % STAGE_STEPS == 0;
    Sums part, total;  // of a run of groups, and of those before it
    int left;          // steps of the run
    Shared* memory;
    int slot, buffer;  // of the rows that are multiplied, and of what is found of them

    __device__ void open(Shared& s)
    {
        memory = &s;
        slot = ROW_SLOTS - 1;
        buffer = 1;
    }
    __device__ void clear()
    {
        left = P::SHARE;
        each([&](float& p, float& t) {
            p = 0.0f;
            t = -0.0f;  // which changes nothing that is added to it
        });
    }
    // On to the next stage.
    __device__ void turn()
    {
        slot = slot + 1 == ROW_SLOTS ? 0 : slot + 1;
        buffer ^= 1;
    }
    // What -136 times the rows of the stage behind gives, an eight of rows a warp, if it has one of
    // `count`. They have landed.
    __device__ void find_base(int count) const
    {
        const int warp = (int)threadIdx.x / WARP, lane = lane_id();
        if (8 * warp >= count) return;
        const Fragment all = {{MINUS_136, MINUS_136, MINUS_136, MINUS_136}};
        const int behind = slot + 1 == ROW_SLOTS ? 0 : slot + 1;
        const SharedAddress rows =
            shared_address(&memory->rows[behind]) + 8 * warp * ROW_BYTES + 16 * lane;
        float2 found[STAGE_STEPS];
#pragma unroll
        for (int i = 0; i < STAGE_STEPS; ++i) {
            const uint4 b = shared_vector(rows + i * STEP_ROWS_BYTES);
            float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            multiply_add(c, all, b.x, b.y);
            multiply_add(c, all, b.z, b.w);
            found[i] = {c[0], c[1]};
        }
        if (lane >= 4) return;
#pragma unroll
        for (int i = 0; i < STAGE_STEPS; ++i)
            *(float2*)&memory->base[buffer ^ 1][i][8 * warp + 2 * lane] = found[i];
    }
    __device__ void multiply(WeightRing<UP>& ring, int count, int steps)
    {
        // Two blocks a multiprocessor hide what the down product waits for; the up product, with twice
        // the sums, multiplies several eights at once.
        if (!UP) return multiply_stage<ROW_TILES, 1>(ring, count, steps);
        switch ((count + 15) / 16) {
            case 1: return multiply_stage<2, 2>(ring, count, steps);
            case 2: return multiply_stage<4, 4>(ring, count, steps);
            case 3: return multiply_stage<6, 3>(ring, count, steps);
            default: return multiply_stage<8, 4>(ring, count, steps);
        }
    }
    // Of all inputs.
    __device__ const Sums& finish()
    {
        if (!UP) return part;
        if (left != P::SHARE) end_run();
        return total;
    }

private:
    template <int MOST, int EIGHTS>
    __device__ __forceinline__ void multiply_stage(WeightRing<UP>& ring, int count, int steps)
    {
        ring.wait();
        const SharedAddress rows = shared_address(&memory->rows[slot]) + 16 * lane_id();
        const SharedAddress base = shared_address(memory->base[buffer]) + lane_id() % 4 * 8;
#pragma unroll
        for (int i = 0; i < STAGE_STEPS; ++i) {
            const Weights w = ring.step(i);
            if (i == STAGE_STEPS - 1) ring.give_back();
            if (!P::WHOLE && i >= steps) break;
            multiply_step<MOST, EIGHTS>(part, w, count, rows + i * STEP_ROWS_BYTES,
                                        base + i * ROWS * (int)sizeof(float));
            if (UP && !WHOLE_SHARES && --left == 0) end_run();
        }
        if (UP && WHOLE_SHARES && (left -= STAGE_STEPS) <= 0) end_run();
    }
    __device__ void end_run()
    {
        left = P::SHARE;
        each([](float& p, float& t) {
            t += p;
            p = 0.0f;
        });
    }
    template <class F>
    __device__ __forceinline__ void each(F change)
    {
#pragma unroll
        for (int j = 0; j < ROW_TILES; ++j)
#pragma unroll
            for (int i = 0; i < 8; ++i) change(part[j][i / 4][i % 4], total[j][i / 4][i % 4]);
    }
};
