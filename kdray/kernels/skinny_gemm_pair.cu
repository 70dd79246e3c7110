// Few rows times two matrices at once: Ops.linear_and_gated for bf16.
//
// out[t] = W x[t], and gates[t] = silu(G x[t]) * U x[t] of the joined matrix of G's rows, then U's:
// the router's logits and the shared expert's inner features of one launch, each to the bit as
// skinny_gemm.cu has them, which explains all that is not said here.
//
// outputs out      [T, outputs] bfloat16, or float32 (OUT_FP32)
//         gates    [T, inner] bfloat16
// inputs  x        [T, inputs] bfloat16
//         weight   [outputs, inputs], gate_up [2 * inner, inputs] bfloat16
// both    work     workspace of uint4, all bits set between launches; null where SPLIT is 1
// sizes   tokens, inputs, outputs, inner; then strides in numbers: x a token, weight an output,
//         gate_up an output
//
// Grid: as skinny_gemm.cu's of one head, whose pieces are the first matrix's, then the second's.
// Both are of SLICES runs of inputs. Limits, precision, oracle and tolerance are skinny_gemm.cu's.

#ifndef OUT_FP32
#define OUT_FP32 1
#endif

extern __shared__ __align__(128) unsigned char block_memory[];

#include "skinny_gemm_product.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
skinny_gemm_pair(void* out, u16* gates, const u16* x, const u16* weight, const u16* gate_up,
                 uint4* work, int tokens, int inputs, int outputs, int inner, int x_token,
                 int w_row, int gate_row)
{
    __shared__ u64 barriers[BARRIERS];
    let_next_start();
    const u32 pieces = (outputs + ROWS - 1) / ROWS * GROUPS;  // of the first matrix
    const bool second = Place::piece_of_grid() >= pieces;
    const Sizes sizes = {tokens,  inputs, second ? 2 * inner : outputs, x_token, 0,
                         second ? gate_row : w_row, 0, second ? inner : outputs, 0};
    Sums sum = {};
    multiply_block(sum, x, second ? gate_up : weight, second, sizes,
                   Place(tokens, threadIdx.x, second ? pieces : 0), shared_address(barriers));
    const Place again(tokens, fresh_thread(), second ? pieces : 0);
    float* const part = (float*)block_memory;
    lay_out(part, sum, again);
    __syncthreads();
    if (second)
        finish<true, false>(part, gates, nullptr, work, sizes, again);
    else
        finish<false, OUT_FP32>(part, out, nullptr, work, sizes, again);
}
