// Design P: one warp a request pops node after node, without a branch in the loop.
//
// The block's other warps read the rows with it and wait; then each writes its share of the tree.
// What one warp does behind the other costs a tree of 16 nodes as much as its pops.
//
// Node i has its frontier entry (its best child not yet taken) in lane i % 32, slot i / 32, as
// registers: the key of that child, the key of the sibling behind it, and the difference from there
// to the next one. So a winner's new key is at hand and its load is needed two pops later.
//
// A pop. `rest` is the greatest key of the frontier but for the newest node, `child` the newest
// node's first child: best = max(rest, child). Lanes whose key is best show their sibling's key to
// the reduction that gives the next turn's rest; it starts at once and all else hides behind it:
// ballot, record, the winner's step to its sibling, the new node's children (one 16-byte load, the
// row chosen by the depth in best's low bits). On a tie the lowest node wins, the others keep their
// key; the reduction has missed them, but then best is still the frontier's maximum, so best itself
// stands in for `child` next turn. Exact, with no second reduction.
//
// The rows hold differences of keys, clamped: a child below -2^26 (16 nat) or absent gets the step
// -2^30. No sum overflows then while the popped key is above LAST_KEY, so that neither saturation
// nor absence costs an instruction. A pop at or below it ends the fast loop, and pop_exactly goes
// on from the nodes before it. Pops behind such a one, at most UNROLL - 1, are garbage in records
// nobody reads.
//
// Only nodes 0 .. budget - 1 ever need an entry. The loop runs in phases of 32 pops, each with as
// many slots as it needs.
#pragma once

#include "build_tree_common.cuh"
#include "build_tree_exact.cuh"

#ifndef KDRAY_POP_UNROLL
#define KDRAY_POP_UNROLL 8  // 4, 8, 16 or 32
#endif

constexpr int LOWEST_SCORE = -(1 << 26);         // of the fast loop
constexpr int LOWEST_STEP = LOWEST_SCORE * 16;   // -2^30
constexpr int LAST_KEY = LOWEST_STEP + MAX_DEPTH;
constexpr int POP_WARPS = 4;
constexpr int POP_THREADS = 32 * POP_WARPS;
constexpr int STEPS_PER_ENTRY = 3;  // a new node takes three steps of a row with its first load
constexpr int TABLE_ROWS = MAX_DEPTH + 1;
constexpr int TABLE_WORDS = TABLE_ROWS * (MAX_WIDTH + 4) + 2 * KDRAY_POP_UNROLL;

template <int SLOTS>
struct PopShared {
    // Row q is for the children of nodes whose key ends in q (depth 15 - q): the first child's
    // step, then from child to child, then down to absence, then zeros. width + 4 words a row.
    alignas(16) int table[TABLE_WORDS];
    alignas(16) int token[MAX_DEPTH * MAX_WIDTH];  // [L, width]
    Record record[32 * SLOTS + 32];                // 1 .. budget, and room for pops behind it
    unsigned above[32 * SLOTS][SLOTS];             // ancestor rows
    int ancestor[32 * SLOTS];
    unsigned char child[32 * SLOTS * MAX_WIDTH];   // node by parent and rank, where there is one
    int first_child[32 * SLOTS + 1];
    int next_sibling[32 * SLOTS + 1];
    int now[32 * SLOTS];  // of pop_exactly
    int cursor[32 * SLOTS];
    int count;
};

template <int SLOTS>
struct Frontier {
    int now[SLOTS];     // key of the best child not yet taken
    int next[SLOTS];    // key of the sibling behind it
    int step[SLOTS];    // from that sibling to the one behind it
    int cursor[SLOTS];  // node << 16 | byte offset in the table of the step to load next
};

// What changes from pop to pop and is the same in every lane.
struct Turn {
    int rest;
    int child;
    int best;
    // The newest node's entry, for the phase that has its slot.
    int first;
    int second;
    int step;
    int cursor;
};

struct PopTable {
    SharedAddress start;
    int stride;  // bytes a row
};

// Behind the last good pop sums may wrap: they must do so without undefined behaviour.
__device__ __forceinline__ int wrapping_sum(int a, int b)
{
    return (int)((unsigned)a + (unsigned)b);
}

template <int LIVE, int SLOTS>
__device__ __forceinline__ void pop(Frontier<SLOTS>& f, Turn& turn, const PopTable& table,
                                    SharedAddress record, bool born, int lane)
{
    const int best = max(turn.rest, turn.child);
    bool equal[LIVE];
    int shown = ABSENT;
#pragma unroll
    for (int s = 0; s < LIVE; ++s) {
        equal[s] = f.now[s] == best;
        shown = max(shown, equal[s] ? f.next[s] : f.now[s]);
    }
    turn.rest = warp_max(shown);

    const int offset = (best & 15) * table.stride;
    const int4 row = load4(table.start + offset);

    const unsigned below = (1u << lane) - 1;
    unsigned taken = 0;  // lanes with the key in an earlier slot
    bool lost = false;
    unsigned twice = 0;
#pragma unroll
    for (int s = 0; s < LIVE; ++s) {
        const unsigned votes = warp_ballot(equal[s]);
        const bool wins = equal[s] && (taken | (votes & below)) == 0;
        if (LIVE == 1) twice = votes & (votes - 1);
        lost |= equal[s] && !wins;
        taken |= votes;
        store2_if(wins, record, f.cursor[s], best);
        f.now[s] = wins ? f.next[s] : f.now[s];
        f.next[s] = add_if(wins, f.next[s], f.step[s]);
        f.step[s] = load_if(wins, table.start + (f.cursor[s] & 0xffff), f.step[s]);
        f.cursor[s] = add_if(wins, f.cursor[s], 4);
    }
    const bool tie = LIVE == 1 ? twice != 0 : __any_sync(FULL_WARP, lost);

    turn.best = best;
    turn.first = wrapping_sum(best, row.x);
    turn.second = wrapping_sum(turn.first, row.y);
    turn.step = row.z;
    turn.cursor = offset + 4 * STEPS_PER_ENTRY;
    turn.child = tie ? best : turn.first;

    constexpr int NEWEST = LIVE - 1;
    const int own = (32 * NEWEST + lane) << 16;
    f.now[NEWEST] = born ? turn.first : f.now[NEWEST];
    f.next[NEWEST] = born ? turn.second : f.next[NEWEST];
    f.step[NEWEST] = born ? turn.step : f.step[NEWEST];
    f.cursor[NEWEST] = born ? own + turn.cursor : f.cursor[NEWEST];
}

// Pops nodes 32 * (LIVE - 1) + 1 .. 32 * LIVE as far as the budget goes; false where it is over.
template <int LIVE, int SLOTS>
__device__ __forceinline__ bool pop_phase(Frontier<SLOTS>& f, Turn& turn, const PopTable& table,
                                          SharedAddress record, int budget, int lane)
{
    constexpr int FIRST = 32 * (LIVE - 1);
    f.now[LIVE - 1] = lane == 0 ? turn.first : ABSENT;
    f.next[LIVE - 1] = lane == 0 ? turn.second : ABSENT;
    f.step[LIVE - 1] = lane == 0 ? turn.step : 0;
    f.cursor[LIVE - 1] = ((FIRST + lane) << 16) + turn.cursor;
#pragma unroll 1
    for (int n = FIRST; n < FIRST + 32; n += KDRAY_POP_UNROLL) {
        if (n >= budget || turn.best <= LAST_KEY) return false;
        const int lanes_to_go = lane - (n - FIRST);
#pragma unroll
        for (int i = 1; i <= KDRAY_POP_UNROLL; ++i)
            pop<LIVE, SLOTS>(f, turn, table, record + (n + i) * sizeof(Record),
                             lanes_to_go == i, lane);
    }
    return true;
}

template <int LIVE, int SLOTS>
__device__ __forceinline__ void pop_phases(Frontier<SLOTS>& f, Turn& turn, const PopTable& table,
                                           SharedAddress record, int budget, int lane)
{
    if (!pop_phase<LIVE, SLOTS>(f, turn, table, record, budget, lane)) return;
    if constexpr (LIVE < SLOTS)
        pop_phases<LIVE + 1, SLOTS>(f, turn, table, record, budget, lane);
}

__device__ __forceinline__ int clamped_key(int score) { return max(score, LOWEST_SCORE) * 16; }

// Four candidates of a row as steps; `before` is the score in front of them, if they are not first.
__device__ __forceinline__ int4 steps_of(int4 score, int before, bool first)
{
    const int a = clamped_key(score.x), b = clamped_key(score.y);
    const int c = clamped_key(score.z), d = clamped_key(score.w);
    return int4{first ? a - 1 : a - clamped_key(before), b - a, c - b, d - c};
}

// The row's end: from the last candidate down to absence, then no further.
__device__ __forceinline__ int4 end_of_row(int last_score)
{
    return int4{LOWEST_STEP - clamped_key(last_score), 0, 0, 0};
}

// Four candidates from `rank` on, and their tokens on their way to `token`.
template <bool ALIGNED>
__device__ __forceinline__ int4 read_four(const Candidates& rows, int at, int rank, bool inside,
                                          int* token)
{
    if constexpr (ALIGNED) {
        copy_async16_if(inside, token, rows.token + at);
        return *(const int4*)(rows.score + at);
    } else {
        int score[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const bool there = rank + k < rows.K;
            copy_async4_if(inside && there, token + k, rows.token + at + k);
            score[k] = there ? rows.score[at + k] : ABSENT;
        }
        return int4{score[0], score[1], score[2], score[3]};
    }
}

// The block fills the table and sends for the tokens. `fours` candidates of each row, by four, are
// used; AT_ONCE of them are loaded by a thread before it looks at the first.
template <bool ALIGNED, int AT_ONCE, int SLOTS>
__device__ __forceinline__ void read_rows(const Candidates& rows, int fours, PopShared<SLOTS>& s)
{
    const int me = threadIdx.x;
    const SharedAddress table = shared_address(s.table);
    const int stride = 4 * fours + 4;
    const int log_fours = 32 - __clz(fours - 1);  // up to a power of two: no division
    const int quads = rows.L << log_fours;
    for (int start = 0; start < quads; start += POP_THREADS * AT_ONCE) {
        int4 score[AT_ONCE];
        int before[AT_ONCE];
        SharedAddress place[AT_ONCE];
        int rank[AT_ONCE];
        bool inside[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            // Threads beyond the rows read the first candidates and store nothing.
            const int quad = start + POP_THREADS * i + me;
            const int four = quad & ((1 << log_fours) - 1);
            inside[i] = quad < quads && four < fours;
            const int depth = inside[i] ? quad >> log_fours : 0;
            rank[i] = inside[i] ? 4 * four : 0;
            const int at = depth * rows.K + rank[i];
            before[i] = rows.score[rank[i] > 0 ? at - 1 : at];
            int* token = &s.token[4 * fours * depth + rank[i]];
            score[i] = read_four<ALIGNED>(rows, at, rank[i], inside[i], token);
            place[i] = table + ((MAX_DEPTH - depth) * stride + rank[i]) * 4;
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            store4_if(inside[i], place[i], steps_of(score[i], before[i], rank[i] == 0));
            const bool last = rank[i] == 4 * fours - 4;
            store4_if(inside[i] && last, place[i] + 16, end_of_row(score[i].w));
        }
    }
    // Nodes at depth L have no children.
    if (me <= MAX_DEPTH - rows.L)
        *(int4*)(s.table + me * stride) = int4{LOWEST_STEP - 1, 0, 0, 0};
}

// Offsets in the table become ranks; returns the nodes in front of the first pop that was none.
template <int SLOTS>
__device__ __forceinline__ int settle_records(PopShared<SLOTS>& s, int stride, int budget, int lane)
{
    int count = budget;
#pragma unroll
    for (int slot = SLOTS - 1; slot >= 0; --slot) {
        const int n = 32 * slot + lane + 1;
        Record r{0, 0};
        if (n <= budget) r = s.record[n];
        const unsigned over = warp_ballot(n <= budget && r.y <= LAST_KEY);
        if (over != 0) count = 32 * slot + __ffs(over) - 1;
        const int row = ((r.y & 15) + 1) * stride;  // of the parent, one less deep
        const int rank = ((r.x & 0xffff) - row) / 4 - STEPS_PER_ENTRY;
        if (n <= budget) s.record[n].x = (r.x & ~0xffff) | (rank & 0xffff);
    }
    return count;
}

template <int SLOTS>
__device__ __forceinline__ void read_rows(const Candidates& rows, int fours, PopShared<SLOTS>& s)
{
    const bool aligned = rows.K % 4 == 0 && ((size_t)rows.score | (size_t)rows.token) % 16 == 0;
    if (!aligned)
        read_rows<false, 1>(rows, fours, s);
    else if (rows.L * fours <= POP_THREADS / 2)  // a power of two may be up to twice as wide
        read_rows<true, 1>(rows, fours, s);
    else
        read_rows<true, 2>(rows, fours, s);
}

// One warp builds the request's tree into s.record, record 0 being the root's; returns its number
// of draft nodes, which are at most `asked` and `limit`. The rows are in place.
template <int SLOTS>
__device__ __forceinline__ int build_by_popping(const Candidates& rows, int asked, int limit,
                                                int fours, PopShared<SLOTS>& s)
{
    const int lane = threadIdx.x & 31;
    const int budget = max(0, min(use_from_here(asked), limit));

    const PopTable table{shared_address(s.table), 4 * (4 * fours + 4)};
    const int4 row = load4(table.start + ROOT_KEY * table.stride);
    Turn turn;
    turn.best = ROOT_KEY;
    turn.rest = ABSENT;
    turn.first = ROOT_KEY + row.x;
    turn.second = turn.first + row.y;
    turn.step = row.z;
    turn.child = turn.first;
    turn.cursor = ROOT_KEY * table.stride + 4 * STEPS_PER_ENTRY;
    Frontier<SLOTS> frontier;
    if (lane == 0) s.record[0] = Record{-65536, ROOT_KEY};  // parent -1
    pop_phases<1, SLOTS>(frontier, turn, table, shared_address(s.record), budget, lane);
    __syncwarp();

    int count = settle_records(s, table.stride, budget, lane);
    if (count < budget) {
        __syncwarp();
        count = pop_exactly<SLOTS>(rows, count, budget, s.record, s.now, s.cursor);
    }
    return count;
}
