// Cache rows of accepted draft nodes move to their place in the text, in every layer at once.
//
// caches   [G, 3] int64: address, bytes a row, rows of each cache [S, ..]; caches of a launch may
//          differ in width. A row is a multiple of 4 bytes; where address and row are multiples of
//          16, it moves in vectors of 16. Rows behind a cache's end are neither read nor written.
//
// Entry points
//   commit_kv         row source[i] -> row target[i], [M] int64 each: Ops.commit_kv. Targets are
//                     distinct; a source may be another row's target.
//   commit_paths      the same from what the device knows: node path[r, k] of request r lies at
//                     cache position root_position + path[r, k] and moves to root_position + k.
//   advance_requests  root_position += length, root = bonus: the next step's trees start there.
//
// All rows are read before any is written. A block sees to that alone: it holds some columns of
// all the rows that can touch each other (commit_kv: of all rows; commit_paths: of one request's,
// since no two requests share a scratch place), reads them, meets at a barrier, writes them.
//
// Block (x, y): x columns side by side, y rows at once, ITEMS rows a thread: M <= ITEMS * y.
// Grid (column slices, requests or 1, G). Registers hold what is moved; commit_paths takes 1 KB of
// shared memory. Bytes are copied: equal to ReferenceOps.commit_kv exactly.

#include "overlap.cuh"

#ifndef PATH_ROWS
#define PATH_ROWS 8  // ITEMS of commit_paths
#endif

constexpr int LIST_ROWS = 8;   // ITEMS of commit_kv
constexpr int MAX_MOVES = 64;  // draft nodes on a path

struct Cache {
    long long address;
    long long row_bytes;
    long long rows;  // < 2^31
};

__device__ int row_or_none(long long row, long long rows)
{
    return row >= 0 && row < rows ? (int)row : -1;
}

// A thread holds rows threadIdx.y, threadIdx.y + blockDim.y, .. of one column at a time.
template <typename Vector, int ITEMS>
__device__ void move_slices(Cache cache, const long long* source, const long long* target, int moves)
{
    char* base = (char*)cache.address;
#ifdef __CUDACC__
    __builtin_assume(__isGlobal(base));  // else every access would have to find out
#endif
    const int columns = cache.row_bytes / sizeof(Vector);
    const int slices = (columns + blockDim.x - 1) / blockDim.x;
    for (int slice = blockIdx.x; slice < slices; slice += gridDim.x) {
        const int column = slice * blockDim.x + threadIdx.x;
        Vector held[ITEMS];
        int from[ITEMS], to[ITEMS];  // -1: nothing moves
        // First all slots, then all rows, so that their trips to memory overlap.
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int move = threadIdx.y + i * blockDim.y;
            const bool own = move < moves && column < columns;
            const long long old_row = own ? source[move] : -1;
            const long long new_row = own ? target[move] : -1;
            from[i] = row_or_none(old_row, cache.rows);
            to[i] = old_row == new_row ? -1 : row_or_none(new_row, cache.rows);
        }
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (from[i] >= 0 && to[i] >= 0)
                held[i] = ((const Vector*)(base + from[i] * cache.row_bytes))[column];
        __syncthreads();  // slices are apart, so nothing waits behind the writes
#pragma unroll
        for (int i = 0; i < ITEMS; ++i)
            if (from[i] >= 0 && to[i] >= 0)
                ((Vector*)(base + to[i] * cache.row_bytes))[column] = held[i];
    }
}

template <int ITEMS>
__device__ void move_rows(Cache cache, const long long* source, const long long* target, int moves)
{
    if ((cache.address | cache.row_bytes) % 16 == 0)
        move_slices<uint4, ITEMS>(cache, source, target, moves);
    else
        move_slices<unsigned, ITEMS>(cache, source, target, moves);
}

extern "C" __global__ void __launch_bounds__(512)
commit_kv(const Cache* caches, const long long* source, const long long* target, int M)
{
    start_behind_previous();
    move_rows<LIST_ROWS>(caches[blockIdx.z], source, target, M);
}

// The cache row of a position by a request's page table; -1 where the table does not reach.
__device__ long long slot_at(const int* pages, int position, int P, int page_size)
{
    const int page = position / page_size;
    if (position < 0 || page >= P) return -1;
    return (long long)pages[page] * page_size + position % page_size;
}

// path [R, D] int32, length [R] int32; page_table [S, P], root_position [S] int32: by slot; slot [R]
// int32, or null where request r has slot r; a slot outside 0 .. S - 1 is a row of padding.
extern "C" __global__ void __launch_bounds__(512)
commit_paths(const Cache* caches, const int* path, const int* length, const int* root_position,
             const int* page_table, const int* slot, int D, int S, int P, int page_size, int G)
{
    __shared__ long long source[MAX_MOVES];
    __shared__ long long target[MAX_MOVES];

    start_behind_previous();
    const int request = blockIdx.y;
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    const int k = thread + 1;  // a thread a path node behind the root
    // Whatever depends on no other load is asked for first.
    const Cache first = caches[blockIdx.z];
    const int own = slot ? slot[request] : request;
    const int node = k < D ? path[(size_t)request * D + k] : 0;
    const bool accepted = k < D && k < length[request] && node != k;
    if (own < 0 || own >= S) return;  // the whole block
    bool moved = false;
    if (k < D) {
        const int root = root_position[own];
        const int* pages = page_table + (size_t)own * P;
        source[thread] = accepted ? slot_at(pages, root + node, P, page_size) : -1;
        target[thread] = accepted ? slot_at(pages, root + k, P, page_size) : -1;
        moved = source[thread] >= 0 && target[thread] >= 0;
    }
    // Most steps accept nodes 0, 1, 2, .. and have nothing to move.
    if (!__syncthreads_or(moved)) return;
    move_rows<PATH_ROWS>(first, source, target, D - 1);
    for (int i = blockIdx.z + gridDim.z; i < G; i += gridDim.z)
        move_rows<PATH_ROWS>(caches[i], source, target, D - 1);
}

// root_position, root [S] int32 of every request's slot; a thread a request, any grid.
extern "C" __global__ void
advance_requests(int* root_position, int* root, const int* length, const int* bonus,
                 const int* slot, int R, int S)
{
    start_behind_previous();
    const int request = blockIdx.x * blockDim.x + threadIdx.x;
    if (request >= R) return;
    const int own = slot ? slot[request] : request;
    if (own < 0 || own >= S) return;
    root_position[own] += length[request];
    root[own] = bonus[request];
}
