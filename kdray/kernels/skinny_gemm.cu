// Few rows times a wide matrix: Ops.linear, Ops.gated_linear and Ops.per_head for bf16.
//
// out[t] = W x[t], where W [outputs, inputs] lies as the checkpoint has it, an output's weights
// side by side. Variants: out + add (a residual, or null); GATED, silu(gate) * up of a joined
// matrix of gate rows, then up rows; a batch of matrices, one a head.
//
// output  out     [T, heads, outputs] bfloat16, or float32 (OUT_FP32); GATED: outputs / 2
// inputs  x       [T, heads, inputs] bfloat16
//         weight  [heads, outputs, inputs] bfloat16
//         add     as out, or null
// both    work    workspace of uint4, all bits set between launches; null where SPLIT is 1
// sizes   tokens, inputs, outputs; then strides in numbers: x a token, x a head, weight an output,
//         weight a head, out a token, out a head (add has out's)
//
// A block takes WARPS_M * ROW_TILES tiles of 16 outputs, up to 8 * TOKEN_TILES tokens (of which
// there are GROUPS) and WARPS_K of the SLICES = WARPS_K * SPLIT runs of inputs. Grid: pieces, that
// is GROUPS * tiles of outputs, by SPLIT, by heads; MANY tokens: SPLIT by pieces by heads. Blocks
// of 32 * WARPS_M * WARPS_K threads. A warp multiplies one run by mma.m16n8k16, outputs on M and
// tokens on N. Inputs go to the fragments in an order of their own, the same for both operands, so
// that a lane's share of a row is 16 bytes in one piece. Weights do not depend on the kernel in
// front: the rings are filled before it has ended (which it must not have written).
//
// Where SPLIT > 1 blocks leave sums for one another in the workspace, and take them as they come: a
// word that is not EMPTY is there. No counter, no fence; the words are emptied again. Blocks start
// in the order of their index. Few tokens: the last of the SPLIT blocks takes all, and waits for
// those before it alone. MANY: each takes its share of the sums, and so waits for all of them, which
// are neighbours; they are never more than fit a device together.
//
// Order of sums: a run in the order of its inputs, runs as a balanced binary tree. It depends on
// SLICES alone, which hangs on the matrix's shape: a token's bits do not depend on its batch, and
// not on how runs are dealt to warps and blocks.
// Limits: inputs a multiple of 32, outputs of 8 (GATED: 16); strides of x and weight of 8, of out
// 4.
// Dynamic shared memory: gemm_plan.shared_bytes, below 99 KB. Products are exact, sums float32 as
// the tensor cores add (chains of 2 * steps of a run), rounded once. Oracle: reference_gemm.py;
// against float64 within 2^-20 of sum |w x|, and bfloat16's rounding.

#ifndef GATED
#define GATED 0
#endif
#ifndef OUT_FP32
#define OUT_FP32 0
#endif

extern __shared__ __align__(128) unsigned char block_memory[];

#include "skinny_gemm_product.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
skinny_gemm(void* out, const u16* x, const u16* weight, const void* add, uint4* work, int tokens,
            int inputs, int outputs, int x_token, int x_head, int w_row, int w_head, int out_token,
            int out_head)
{
    __shared__ u64 barriers[BARRIERS];
    let_next_start();
    const Sizes sizes = {tokens, inputs, outputs, x_token, x_head,
                         w_row,  w_head, out_token, out_head};
    Sums sum = {};
    multiply_block(sum, x, weight, GATED, sizes, Place(tokens, threadIdx.x),
                   shared_address(barriers));
    const Place again(tokens, fresh_thread());  // so that it takes no registers from sums
    lay_out((float*)block_memory, sum, again);
    __syncthreads();
    finish<GATED, OUT_FP32>((float*)block_memory, out, add, work, sizes, again);
}
