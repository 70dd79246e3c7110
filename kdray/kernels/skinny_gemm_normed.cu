// Few rows, normed, times a matrix, in one launch: Ops.norm_linear for bf16 rows of one tile of tokens.
//
// out[t] = W rms_norm(x[t]): to the bit what rms_norm.cu and then skinny_gemm.cu make of it, which
// explain all that is not said here. A launch and its latency, 2 us, is what it saves.
//
// output  out     [T, outputs] bfloat16
// inputs  x       [T, WIDTH] bfloat16
//         weight  [outputs, WIDTH] bfloat16
//         factor  [WIDTH] bfloat16, the norm's weight;  eps [] float32
//         work    null: a block keeps its sums to itself
// sizes   tokens, outputs; then strides in numbers: x a token, weight an output, out a token
//
// Grid: as skinny_gemm.cu's of one head, few tokens and SPLIT 1. Every block fetches whole rows, norms
// them in its shared memory while its weights are under way, and multiplies its tile of outputs. Only
// x waits for the kernel in front.
// Limits: at most 8 tokens, WIDTH a multiple of 32 up to 4096; all of a row's steps in a block's
// buffers at once (CHUNK), a warp of the block for each 256 numbers of a row; strides of 8, of out 4.
// Static shared memory: 4 bytes for each of 8 rows and each 256 numbers of one. Precision, oracles and
// tolerance are those files'.

#ifndef WIDTH
#define WIDTH 1536
#endif
#ifndef WARPS_K
#define WARPS_K 16
#endif
#define INPUT_BF16 1

extern __shared__ __align__(128) unsigned char block_memory[];

#include "skinny_gemm_product.cuh"
#include "skinny_gemm_normed.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
skinny_gemm_normed(u16* out, const u16* x, const u16* weight, const uint4* factor,
                   const float* eps, uint4* work, int tokens, int outputs, int x_token, int w_row,
                   int out_token)
{
    __shared__ float row_sums[NormedRows::PARTS * TOKENS];
    let_next_start();
    const Sizes sizes = {tokens, WIDTH, outputs, x_token, 0, w_row, 0, out_token, 0};
    const Place place(tokens, threadIdx.x);
    const Ring ring = weights_of(weight, false, sizes, place);
    const NormedRows rows(x, x_token, tokens, factor, eps);
    const SharedAddress behind_rings = shared_address(block_memory) + RING_BYTES;
    wait_for_previous();
    rows.bring(behind_rings, row_sums);
    Sums sum = {};
    int step = 0;
    multiply_steps(sum, ring, step, ring.steps, behind_rings + rows.share(place.run));
    __syncthreads();  // rings and rows have been read
    const Place again(tokens, fresh_thread());
    lay_out((float*)block_memory, sum, again);
    __syncthreads();
    finish<false, false>((float*)block_memory, out, nullptr, work, sizes, again);
}
