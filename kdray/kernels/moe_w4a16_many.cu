// moe_w4a16 for many rows: each expert's weights are unpacked once for up to 64 of its rows.
// moe_w4a16_many_up, then moe_w4a16_many_down, then moe_sum_many.
//
//   out      [T, WIDTH] bf16: sum over a row's TOP_K experts, in order, of weight * its output, + shared
//   inner    [P, INNER] bf16: silu(gate) * up of each pair, pairs in the order of `sorted`
//            (P = T * TOP_K)
//   partial  [P, WIDTH] bf16: their outputs, unweighted
//   x        [T, WIDTH] bf16
//   gate_up, down   experts as moe_w4a16.cu has them (moe_layout.py). w = q * scale, unrounded.
//   weight   [P] float32, 0 where there is no expert;  shared [T, WIDTH] bf16
//   tile, sorted, place, num_tiles   by sort_many_rows.cu, with TILE_ROWS 64: up to so many rows of
//            one expert in a tile
//
// Grid of both products: as many blocks of 8 warps as are resident at once, but none waits for
// another. A block takes units in turn: up to 64 rows of one expert by 256 outputs, 32 a warp. Weights
// are the 16-row side of the products, rows of x their 8 columns, of which no more are multiplied than a
// tile has, rounded up to 16 (down: 8). A warp's weights stream through a ring of its own, rows through
// one of the block's, which meets every 64 inputs; both run on from unit to unit.
// Grid of moe_sum_many: (T, WIDTH / 1024 rounded up), 128 threads of 8 columns.
// Limits: WIDTH and INNER multiples of 32; T * WIDTH and P * INNER < 2^31; dynamic shared memory
// sizeof(Shared), which cuda_moe_many.py knows.
// Products exact, sums float32; inner and partial are rounded once. Sums go in moe_w4a16's order, so
// a row has the bits that it has there, whatever its batch: -136 times a group's inputs (a weight is
// q = (n + 128) - 136) first, a sum a group, its scale, 16 runs of groups in the up product, each
// of them added up, then all in order. What -136 gives is the same for all outputs and found once a
// block.
// Oracle: reference_moe.moe_w4a16; within 1 % (norm of a row's error over the row's norm), and
// moe_w4a16's bits exactly. Defines: WIDTH, INNER, TOP_K, LISTED_TILES (that a block has room for),
// SHARED_BYTES of a block.

#include "moe_w4a16_many_product.cuh"
#include "overlap.cuh"

// Rows of fragment 0 are columns 2 g and 2 g + 1 of gate, of fragment 1 the same of up.
__device__ __forceinline__ void store(u16* inner, const Tile& tile, int group, const Sums& sum,
                                      Product<true>)
{
    const int lane = lane_id();
#pragma unroll
    for (int j = 0; j < ROW_TILES; ++j)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const int row = 8 * j + lane % 4 * 2 + odd;
            if (row >= tile.count()) continue;
            const float(&gate)[4] = sum[j][0];
            const float(&up)[4] = sum[j][1];
            *(u32*)(inner + (i64)(tile.first() + row) * INNER + group * 16 + lane / 4 * 2) =
                bf16_pair(silu(gate[odd]) * up[odd], silu(gate[2 + odd]) * up[2 + odd]);
        }
}

// Rows of fragments are columns 4 g .. 4 g + 3 of a lane: 8 bytes of a row of partial.
__device__ __forceinline__ void store(u16* partial, const Tile& tile, int group, const Sums& sum,
                                      Product<false>)
{
    const int lane = lane_id();
#pragma unroll
    for (int j = 0; j < ROW_TILES; ++j)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const int row = 8 * j + lane % 4 * 2 + odd;
            if (row >= tile.count()) continue;
            const uint2 four = {bf16_pair(sum[j][0][odd], sum[j][0][2 + odd]),
                                bf16_pair(sum[j][1][odd], sum[j][1][2 + odd])};
            *(uint2*)(partial + (i64)(tile.first() + row) * WIDTH + group * STEP + lane / 4 * 4) = four;
        }
}

template <bool UP>
__device__ __forceinline__ void multiply_all(u16* result, const u16* source,
                                             const unsigned char* weights, Units<UP> units,
                                             const int* sorted, Shared& s)
{
    WeightRing<UP> ring{units, weights};
    const int warp = same_in_warp((int)threadIdx.x / WARP);
    ring.open(s.weights[warp], s.landed[warp]);
    units.open(s.tiles);
    __syncthreads();
    ring.fill();
    RowRing<UP> rows{units, source, sorted};
    rows.open(s.rows);

    Cursor<UP> now;
    now.open();
    Multiplier<UP> product;
    product.open(s);
    wait_for_groups<ROW_SLOTS - 2>();
    __syncthreads();
    product.find_base(units.count_or_none(now.unit));
    while (now.there(units)) {
        const Tile tile = units.tile(now.unit);
        const int group = ring.group(now.unit);
        const bool own = Product<UP>::ALL_WARPS || group < Product<UP>::GROUPS;
        product.clear();
#pragma unroll 1
        for (bool last = false; !last;) {
            // The rows behind this stage's have landed, and nobody reads those in front of it now.
            wait_for_groups<ROW_SLOTS - 3>();
            __syncthreads();
            rows.bring_next();
            product.turn();
            const int steps = Product<UP>::steps(now.stage);
            last = now.advance();
            product.find_base(units.count_or_none(now.unit));
            if (own) product.multiply(ring, tile.count(), steps);
        }
        if (own) store(result, tile, group, product.finish(), Product<UP>{});
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_w4a16_many_up(u16* inner, const u16* x, const unsigned char* gate_up, const u32* tile,
                      const int* sorted, const int* num_tiles)
{
    extern __shared__ __align__(128) unsigned char memory[];
    start_behind_previous();
    const Units<true> units{tile, 0, same_in_warp(*num_tiles)};
    multiply_all<true>(inner, x, gate_up, units, sorted, *(Shared*)memory);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int DOWN_BLOCKS = 1;  // for which a multiprocessor has the shared memory
#else
constexpr int DOWN_BLOCKS = 2;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, DOWN_BLOCKS)
    moe_w4a16_many_down(u16* partial, const u16* inner, const unsigned char* down, const u32* tile,
                        const int* num_tiles)
{
    extern __shared__ __align__(128) unsigned char memory[];
    start_behind_previous();
    const Units<false> units{tile, 0, same_in_warp(*num_tiles)};
    multiply_all<false>(partial, inner, down, units, nullptr, *(Shared*)memory);
}

// Eight bf16 times w, onto sums.
__device__ __forceinline__ void add_eight(float (&sum)[8], const uint4& v, float w)
{
    const float x[8] = {bf16_low(v.x), bf16_high(v.x), bf16_low(v.y), bf16_high(v.y),
                        bf16_low(v.z), bf16_high(v.z), bf16_low(v.w), bf16_high(v.w)};
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] += w * x[i];
}

extern "C" __global__ void __launch_bounds__(128)
    moe_sum_many(u16* out, const u16* partial, const int* place, const float* weight,
                 const u16* shared)
{
    start_behind_previous();
    const int row = blockIdx.x, column = (int)(blockIdx.y * 128 + threadIdx.x) * 8;
    if (column >= WIDTH) return;
    float w[TOP_K];
    uint4 given[TOP_K];
#pragma unroll
    for (int k = 0; k < TOP_K; ++k) {
        w[k] = weight[row * TOP_K + k];
        given[k] = {0, 0, 0, 0};
        if (w[k] != 0.0f)  // else of no expert
            given[k] = *(const uint4*)(partial + (i64)place[row * TOP_K + k] * WIDTH + column);
    }
    float sum[8] = {};
#pragma unroll
    for (int k = 0; k < TOP_K; ++k)
        if (w[k] != 0.0f) add_eight(sum, given[k], w[k]);
    const i64 at = (i64)row * WIDTH + column;
    add_eight(sum, *(const uint4*)(shared + at), 1.0f);
    *(uint4*)(out + at) = {bf16_pair(sum[0], sum[1]), bf16_pair(sum[2], sum[3]),
                           bf16_pair(sum[4], sum[5]), bf16_pair(sum[6], sum[7])};
}
