// moe_w4a16_few: moe_w4a16 and moe_sum in one, for one row or two; the same bits.
//
//   out      [T, WIDTH] bf16
//   inner    [2, 512 * MAX_TOP_K] bf16, launches take turns at them: silu(gate) * up of each pair,
//            [P, INNER]. What is not there yet has all bits set, to begin with everything
//   begun    [1] uint32: blocks of this launch and the one before that have begun; 0 to begin with
//   x, gate_up, down, expert, weight, shared   as in moe_w4a16.cu
//
// A block has its columns of the output, groups of 32, for all experts. So it adds up what they gave
// in its own shared memory, in the order of moe_sum, and no launch has to follow. A warp waits for a
// tile's `inner` by looking at it: no counter and no fence are in between, and a launch empties what
// the next one fills.
//
// Grid: as moe_w4a16's; always the same number of blocks, which must not exceed what is resident.
// Limits: those of moe_w4a16, with tile null; T * INNER <= 512, TOP_K <= MAX_TOP_K; with G = a block's
// columns / 32, at most: G <= 32, and 1,040 + 64 * G * (P + T) + 4 * P <= LIST_BYTES.
// Products exact, sums float32, in moe_w4a16's order; inner and an expert's output are rounded once.
// Oracle: reference_moe.moe_w4a16; within 1 % (norm of a row's error over the row's norm), and
// moe_w4a16's bits exactly.
// Defines: moe_w4a16's with COLUMN_TILES 1 and PARTS 1; MAX_TOP_K.

#include "moe_w4a16_few.cuh"
#include "overlap.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    moe_w4a16_few(u16* out, u16* inner, u32* begun, const u16* x, const unsigned char* gate_up,
                  const unsigned char* down, const i64* expert, const float* weight,
                  const u16* shared, int num_pairs)
{
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& s = *(Shared*)memory;
    const int warp = threadIdx.x / WARP;
    OwnedUnits units;
    Stream<OwnedUnits> stream{units, {}, 0, 0, nullptr};
    stream.ring.open(&s.ring[warp][0][0], s.landed[warp]);
    Adder<FilledInner> adder{s.part, 0, {}, 0};
    adder.open(s.meeting);
    if (threadIdx.x < 4) s.minus_136[threadIdx.x] = MINUS_136;
    start_behind_previous();

    const u32 blocks_before = threadIdx.x == 0 ? load_relaxed(begun) : 0;
    units.gate_up = gate_up;
    units.down = down;
    units.tiles = Tiles::of(s.list, nullptr, nullptr, nullptr, expert, num_pairs, num_pairs);
    units.count();
    if (threadIdx.x == 0) s.meeting.second = blocks_before >= gridDim.x;
    __syncthreads();
    stream.fill();

    if (threadIdx.x == 0) count_round(begun, 2 * gridDim.x - 1);
    const Turn turn = Turn::of(inner, s.meeting.second);
    turn.empty_other();
    adder.inner.rows = turn.own;
    const Terms terms = Terms::in(s.list, units.groups, num_pairs);
    terms.fetch(weight, shared);
    Staged staged{adder, (u16*)s.part[0][warp], -1};
    Activations<OwnedUnits, Staged> next{units, staged, x, 0, 0, x, {}};
    multiply_all(units, stream, next, adder, s.minus_136, terms);
    wait_for_copies();
    __syncthreads();
    terms.add_up(out, shared != nullptr);
}
