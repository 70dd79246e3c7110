// A warp's weights in skinny_gemm.cu: where they lie in the matrix, and a lane's share of a step. Part
// of that file, by whose sizes it is compiled.
#pragma once

// The warp's run of weights, on its way. `gated`: a tile is 8 gate rows, then their up rows.
__device__ __forceinline__ Ring weights_of(const u16* weight, bool gated, const Sizes& sizes,
                                           const Place& place)
{
    const int lane = lane_id(), g = lane / 4, t = lane % 4;
    const int first_step = sizes.first_step(place.slice());

    Ring ring;
    ring.steps = sizes.first_step(place.slice() + 1) - first_step;
    ring.base = shared_address(block_memory) + threadIdx.x / WARP * Ring::BYTES + lane * 16;
    const u16* const matrix = weight + (i64)blockIdx.z * sizes.w_head + first_step * STEP + 8 * t;
    const int half = sizes.outputs / 2;
#pragma unroll
    for (int m = 0; m < ROW_TILES; ++m) {
        // Rows behind the last are computed with it, and written nowhere.
        const int tile = (place.tile * WARPS_M + place.row_warp) * ROW_TILES + m;
        const int row = min(tile * (gated ? 8 : 16) + g, (gated ? half : sizes.outputs) - 1);
        const int other = gated ? row + half : min(tile * 16 + g + 8, sizes.outputs - 1);
        ring.row[2 * m] = (const unsigned char*)(matrix + (i64)row * sizes.w_row);
        ring.row[2 * m + 1] = (const unsigned char*)(matrix + (i64)other * sizes.w_row);
    }
    ring.fill();
    return ring;
}

// A lane's weights of one step.
struct Weights {
    uint4 part[Ring::PARTS];

    __device__ void load(const Ring& ring, int step)
    {
#pragma unroll
        for (int p = 0; p < Ring::PARTS; ++p) part[p] = ring.part(step, p);
    }
};
