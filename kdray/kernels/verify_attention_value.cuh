// A value warp: sums of weighted values in 16-dimension tiles `warp`, `warp` + 8, .. for all rows
// of the tile; in its turn it brings the keys of a step. Results are dimensions by rows (M by N): A
// fragments are values, B fragments weights, and lane 4 g + t has dimensions g and g + 8 of rows 2t
// and 2t + 1.
//
// Of keys in fp8 a matrix load brings pairs of neighbouring dimensions of 32: the even ones make a
// tile and the odd ones another, so tiles come in pairs. A fragment that is written has the numbers
// of both that are neighbours: dimensions 2g and 2g + 1 of rows 2t and 2t + 1.
#pragma once

#include "attention_fragment.cuh"
#include "verify_attention_ring.cuh"

#if KV_FP8
// 16 dimensions of the first `rows` of eight rows, of fragments with neighbours.
__device__ __forceinline__ void write_fragment(u16* out, int rows, float4 x) {
    const u32 lane = fresh_thread() % WARP;
    const int row = lane % 4 * 2;
    u32* const to = (u32*)(out + row * LATENT) + lane / 4;
    if (row < rows) to[0] = bf16_pair(x.x, x.z);
    if (row + 1 < rows) to[LATENT / 2] = bf16_pair(x.y, x.w);
}
#else
__device__ __forceinline__ void write_fragment(u16* out, int rows, float4 x) {
    write_fragment<LATENT>(out, rows, x);
}
#endif

template <int EIGHTS>  // of rows, or more than there are
struct ValueWarp {
    Shared& s;
    const Attention& in;
    static constexpr int AT_ONCE = 2;  // tiles whose values are in registers
    float value[VALUE_TILES][EIGHTS][4];

    __device__ ValueWarp(Shared& shared, const Attention& attention) : s(shared), in(attention) {
#pragma unroll
        for (int i = 0; i < VALUE_TILES * EIGHTS * 4; ++i) (&value[0][0][0])[i] = 0;
    }
    __device__ static u32 lane_now() { return fresh_thread() % WARP; }
    __device__ static u32 warp_now() { return fresh_thread() / WARP - SCORE_WARPS; }

    __device__ u32 tile(int m) const {
        return TILES_BESIDE * (warp_now() + VALUE_WARPS * (m / TILES_BESIDE)) + m % TILES_BESIDE;
    }
    __device__ bool has(int m) const {
        constexpr bool ALL = VALUE_STEPS % (TILES_BESIDE * VALUE_WARPS) == 0;
        return m < VALUE_TILES && (ALL || tile(m) < VALUE_STEPS);
    }
    // What is written of tile m for an eight of rows.
    __device__ float4 fragment(int m, int n) const {
#if KV_FP8
        const float(&even)[4] = value[m / 2 * 2][n], (&odd)[4] = value[m / 2 * 2 + 1][n];
        const int k = m % 2 * 2;
        return {even[k], even[k + 1], odd[k], odd[k + 1]};
#else
        const float(&x)[4] = value[m][n];
        return {x[0], x[1], x[2], x[3]};
#endif
    }

    __device__ void run() {
        const Ring ring = {s, in};
        u32 step = s.first_step;
        ring.begin();
#pragma unroll 1
        for (u32 ahead = step; ahead < step + SLOTS - 1 && ahead < s.end_step; ++ahead)
            if (ring.mine(ahead)) {
                if (!ring.is_cached(ahead)) wait_for_previous();
                ring.bring(ahead);
            }
        start_behind_previous();
#pragma unroll 1
        for (; step < s.end_step; ++step) {
            const u32 next = step + SLOTS - 1;
            if (ring.mine(next) && next < s.end_step) ring.bring(next);
            barrier_wait(shared_address(&s.weighed[step % 2]), step / 2 % 2);
            rescale(step);
            add(step);
            arrive(s.freed[slot_of(step)]);
        }
        barrier_wait(shared_address(&s.normed), s.pieces % 2);
        if (s.piece.whole())
            write_result();
        else
            write_part();
    }

    // What has been added is made relative to the maxima of the step where that raised any.
    __device__ void rescale(u32 step) {
        const u32 lane = lane_now();
        const u32* const raised = s.raised[step % 2];
        const uint4 last = *(const uint4*)raised;
        if (last.x != step && last.y != step && last.z != step && last.w != step) return;
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n) {
            if (raised[n % SCORE_WARPS] != step) continue;
            const float2 by = *(const float2*)&s.rescale[step % 2][EIGHT * n + lane % 4 * 2];
#pragma unroll
            for (int m = 0; m < VALUE_TILES; ++m) {
                value[m][n][0] *= by.x;
                value[m][n][1] *= by.y;
                value[m][n][2] *= by.x;
                value[m][n][3] *= by.y;
            }
        }
    }

    // Four matrices are two eights' weights of 16 keys, or 16 dimensions of 16 keys.
    __device__ void add(u32 step) {
        const u32 lane = lane_now();
        const SharedAddress weights =
            shared_address(s.weights[step % 2]) +
            weight_place(lane / 16 * EIGHT + lane % 8, lane / 8 % 2);
        const SharedAddress slot = shared_address(s.ring) + slot_of(step) * SLOT_BYTES +
                                   (lane / 16 * EIGHT + lane % 8) * STRIDE + lane / 8 % 2 * 16 +
                                   32 * warp_now();
#pragma unroll
        for (int m = 0; m < VALUE_TILES; m += AT_ONCE) {
            u32 v[AT_ONCE][4];
            u32 w[2][4];
            if (m > 0) __syncwarp();  // else the compiler loads all values first, and spills
            load_values(v, slot, m);
            load_matrices(w[0], weights);
#pragma unroll
            for (int n = 0; n < EIGHTS; n += 2) {
                if (n + 2 < EIGHTS)
                    load_matrices(w[(n / 2 + 1) % 2], weights + (n + 2) * EIGHT * 2 * STEP);
                const u32(&p)[4] = w[n / 2 % 2];
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    if (!has(m + i)) continue;
                    const u32(&a)[4] = v[i];
                    weigh(value[m + i][n], a, p[0], p[1]);
                    if (n + 1 < EIGHTS) weigh(value[m + i][n + 1], a, p[2], p[3]);
                }
            }
        }
    }
    __device__ void load_values(u32 (&v)[AT_ONCE][4], SharedAddress slot, int m) const {
#if KV_FP8
        u32 both[4];
        if (!has(m)) return;
        load_matrices_transposed(both, slot + 32 * VALUE_WARPS * (m / 2));
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            const u32 apart = even_bytes_low(both[k]);
            v[0][k] = half_pair_of_e4m3(apart);
            v[1][k] = half_pair_of_e4m3_high(apart);
        }
#else
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (has(m + i)) load_matrices_transposed(v[i], slot + 32 * VALUE_WARPS * (m + i));
#endif
    }
    __device__ static void weigh(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if KV_FP8
        multiply_add_half(sum, a[0], a[1], a[2], a[3], b0, b1);
#else
        multiply_add(sum, a[0], a[1], a[2], a[3], b0, b1);
#endif
    }

    // Fragments as they are, so that a warp writes 512 bytes at a time.
    __device__ void write_part() const {
        const int eights = s.piece.eights();
        const u32 lane = lane_now();
        float4* const part =
            in.work.value +
            (i64)s.piece.part(s.piece.number) * (TILE_ROWS / EIGHT * VALUE_STEPS * WARP) + lane;
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n) {
            if (n >= eights) return;
#pragma unroll
            for (int m = 0; m < VALUE_TILES; ++m) {
                if (has(m)) part[(n * VALUE_STEPS + tile(m)) * WARP] = fragment(m, n);
            }
        }
    }
    __device__ void write_result() const {
        const int eights = s.piece.eights();
        const u32 lane = lane_now();
        const i64 packed = (i64)s.piece.first_row * in.heads + s.piece.first;
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n) {
            if (n >= eights) return;
            const u32 row = EIGHT * n + lane % 4 * 2;
            const float by[2] = {1.0f / s.norm[row].y, 1.0f / s.norm[row + 1].y};
#pragma unroll
            for (int m = 0; m < VALUE_TILES; ++m) {
                const float4 x = fragment(m, n);
                if (has(m))
                    write_fragment(in.out + (packed + EIGHT * n) * LATENT + 16 * tile(m),
                                   s.piece.rows - EIGHT * n,
                                   {x.x * by[0], x.y * by[1], x.z * by[0], x.w * by[1]});
            }
        }
    }
};

__device__ __forceinline__ void sum_values(Shared& s, const Attention& in) {
    const int eights = s.piece.eights();
    if (TILE_EIGHTS > 8 && eights > 8)
        ValueWarp<TILE_EIGHTS>(s, in).run();
    else if (eights > 5)
        ValueWarp<8>(s, in).run();
    else if (eights > 3)
        ValueWarp<5>(s, in).run();
    else if (eights > 1)
        ValueWarp<3>(s, in).run();
    else
        ValueWarp<1>(s, in).run();
}
