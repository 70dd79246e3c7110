// A step's pairs by expert, sorted by every block for itself into its list: tiles of 4 bytes, at most
// one a pair, and behind them the pairs of 2 bytes. Nothing depends on the order of the tiles.
#pragma once

#include "moe_w4a16_stream.cuh"

constexpr int COLUMNS = 8 * COLUMN_TILES;  // rows of x in a tile, columns of the product

// One expert's rows, or some of them: `sorted` has their pairs side by side.
struct Tile {
    int expert, count, first;

    static constexpr int EXPERT_BITS = 10, COUNT_BITS = 5;  // 1 .. 32: less 1
    __device__ u32 packed() const
    {
        return (u32)first << (EXPERT_BITS + COUNT_BITS) | (u32)(count - 1) << EXPERT_BITS |
               (u32)expert;
    }
    __device__ static Tile unpacked(u32 entry)
    {
        return {(int)(entry % (1u << EXPERT_BITS)),
                (int)(entry >> EXPERT_BITS) % (1 << COUNT_BITS) + 1,
                (int)(entry >> (EXPERT_BITS + COUNT_BITS))};
    }
};
static_assert(LIST_BYTES >= 6 * WARP && LIST_BYTES % 16 == 0, "room for a warp's pairs");
static_assert(COLUMNS <= 1 << Tile::COUNT_BITS, "as packed");

// A pair a lane, in each warp; the first warp writes. Tiles come in the order of their first pairs.
// Gives their number. For at most 32 pairs, of which no expert has more than a tile takes.
__device__ __forceinline__ int sorted_by_warps(unsigned char* list, const i64* expert, int num_pairs)
{
    u32* const entries = (u32*)list;
    u16* const pairs = (u16*)(list + 4 * num_pairs);
    const int lane = lane_id();
    const u32 lower = (1u << lane) - 1;
    const int own = lane < num_pairs ? (int)expert[lane] : -1;
    const u32 same = __match_any_sync(ALL_LANES, own);
    const bool leads = own >= 0 && (same & lower) == 0;
    const u32 leaders = __ballot_sync(ALL_LANES, leads);
    int end = leads ? __popc(same) : 0;  // of the pairs of all leaders so far
#pragma unroll
    for (int by = 1; by < WARP; by *= 2) {
        const int before = __shfl_up_sync(ALL_LANES, end, by);
        if (lane >= by) end += before;
    }
    const int first = __shfl_sync(ALL_LANES, end - (leads ? __popc(same) : 0), __ffs(same) - 1);
    if (threadIdx.x < WARP && own >= 0) {
        if (leads) entries[__popc(leaders & lower)] = Tile{own, __popc(same), first}.packed();
        pairs[first + __popc(same & lower)] = (u16)lane;
    }
    return __popc(leaders);
}

// Up to MOST_UNSORTED pairs: a quad of lanes compares its pair with all, a lane with a part of them.
// They lie behind the list, 2 bytes each, and which places a tile begins at, a bit each.
constexpr int MOST_UNSORTED = 128;
constexpr int PART_EIGHTS = MOST_UNSORTED / 4 / 8;  // of a lane of a quad, experts each
constexpr u32 NO_EXPERT = 0xffff;                  // above all others
constexpr bool SORTS_MANY = LIST_BYTES >= 8 * MOST_UNSORTED + 16;

// How many of the others go before a pair, how many of them have its expert, and how many have it.
struct Place {
    int smaller, before, same;

    __device__ void sum_over_quad()
    {
#pragma unroll
        for (int by = 1; by < 4; by *= 2) {
            smaller += __shfl_xor_sync(ALL_LANES, smaller, by);
            before += __shfl_xor_sync(ALL_LANES, before, by);
            same += __shfl_xor_sync(ALL_LANES, same, by);
        }
    }
};

__device__ __forceinline__ Place place_among(const u16* experts, int num_pairs, int pair, u32 own)
{
    Place place{};
#pragma unroll
    for (int i = 0; i < PART_EIGHTS; ++i) {
        const int begin = (4 * i + lane_id() % 4) * 8;
        if (32 * i >= num_pairs) break;
        const uint4 eight = *(const uint4*)(experts + begin);
        const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const u32 other = j % 2 ? words[j / 2] >> 16 : words[j / 2] & 0xffff;
            place.smaller += other < own;
            place.same += other == own;
            place.before += other == own && begin + j < pair;
        }
    }
    place.sum_over_quad();
    return place;
}

// Tiles come in the order of their experts.
__device__ __forceinline__ int sorted_by_quads(unsigned char* list, const i64* expert, int num_pairs)
{
    u32* const entries = (u32*)list;
    u16* const pairs = (u16*)(list + 4 * num_pairs);
    u32* const begins = (u32*)(list + 6 * MOST_UNSORTED);
    u16* const experts = (u16*)(begins + MOST_UNSORTED / WARP);
    const int thread = (int)threadIdx.x, pair = thread / 4;
    if (thread < MOST_UNSORTED) experts[thread] = (u16)(thread < num_pairs ? expert[thread] : -1);
    if (thread < MOST_UNSORTED / WARP) begins[thread] = 0;
    __syncthreads();
    const u32 own = experts[pair];
    Place place{};
    if (thread / WARP * (WARP / 4) < num_pairs)  // or the warp has none
        place = place_among(experts, num_pairs, pair, own);
    const int at = place.smaller + place.before;
    const bool speaks = thread % 4 == 0 && own != NO_EXPERT, leads = place.before % COLUMNS == 0;
    if (speaks) pairs[at] = (u16)pair;
    if (speaks && leads) atomicOr(&begins[at / WARP], 1u << at % WARP);
    __syncthreads();
    int number = 0, earlier = 0;
#pragma unroll
    for (int i = 0; i < MOST_UNSORTED / WARP; ++i) {
        if (i == at / WARP) earlier = number + __popc(begins[i] & ((1u << at % WARP) - 1));
        number += __popc(begins[i]);
    }
    if (speaks && leads)
        entries[earlier] = Tile{(int)own, min(COLUMNS, place.same - place.before), at}.packed();
    return number;
}

// To be called by the whole block, which is to meet before it looks at the list.
__device__ __forceinline__ int sorted_by_block(unsigned char* list, const i64* expert, int num_pairs)
{
    if (!SORTS_MANY || num_pairs <= min(WARP, COLUMNS * TOP_K))
        return sorted_by_warps(list, expert, num_pairs);
    return sorted_by_quads(list, expert, num_pairs);
}
