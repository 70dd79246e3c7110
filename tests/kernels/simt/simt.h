// CUDA on one CPU core, for tests: a kernel's own source, compiled by g++ with this file in front.
//
// Every thread of a block is a fiber; blocks run one after another, save that a block which waits for
// others (as those of a cooperative launch may) is set aside for them. Warp collectives are rendezvous:
// all lanes named in the mask must meet at the same operation, or the program stops with a message.
// __syncthreads is a rendezvous of all threads that have not returned. Between two such points the
// fibers run in an order drawn from a seed, and a fiber may be set aside at any shared-memory
// helper, so that a missing barrier shows as a wrong result. Shared memory is poisoned before each
// block. What this cannot show: races within one instruction stream of hardware, memory-model
// faults, time.
//
// Matrix products are emulated from the documented fragments; their sums' order is this file's own.
//
// Not covered, as no kernel here needs it: partial masks, cooperative groups, textures, streams.
#pragma once

#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#define KDRAY_SIMT 1
#define __device__
#define __host__
#define __global__
#define __constant__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
// Static shared memory: a section of its own, so that it can be found and poisoned.
#define __shared__ static __attribute__((section("simt_shared")))

struct uint3_ {
    unsigned x = 0, y = 0, z = 0;
};
using dim3 = uint3_;
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

extern "C" char __start_simt_shared[] __attribute__((weak));
extern "C" char __stop_simt_shared[] __attribute__((weak));

inline dim3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

namespace simt {

constexpr size_t SHARED_LIMIT = 99 * 1024;
constexpr size_t STACK_BYTES = 64 * 1024;
constexpr int PATIENCE = 20000;  // rounds of blocks that wait
alignas(128) inline unsigned char dynamic_shared[SHARED_LIMIT + 64];

enum class Wait { none, warp, block, barrier, others, done };

struct Copy {
    void* to;
    const void* from;  // null: zeros
    size_t bytes;
    std::shared_ptr<bool> landed = std::make_shared<bool>(false);  // whoever waits for it first
};

inline void land(const Copy& copy)
{
    if (std::exchange(*copy.landed, true)) return;
    if (copy.from == nullptr)
        std::memset(copy.to, 0, copy.bytes);
    else
        std::memcpy(copy.to, copy.from, copy.bytes);
}

struct Fiber {
    ucontext_t context;
    std::unique_ptr<unsigned char[]> stack;  // not filled: most of it is never touched
    Wait wait = Wait::none;
    const char* operation = nullptr;
    unsigned mask = 0;
    uint64_t given = 0;
    int aux = 0;
    uint64_t received = 0;
    std::vector<Copy> copies;
    std::vector<size_t> groups;  // how many of the copies each group takes
};

// Copies that a thread has started, and the barrier that learns of it when they have landed: by the
// thread's arrival, or by their bytes.
struct Flight {
    unsigned barrier;
    std::vector<Copy> copies;
    bool counts_bytes;
};

// A block that has been set aside.
struct Block {
    dim3 index;
    std::vector<Fiber> fibers;
    std::vector<Flight> flights;
    std::vector<unsigned char> memory;
};

struct Machine {
    std::vector<Fiber> fibers;
    std::vector<Flight> flights;
    long idle_spins = 0;
    ucontext_t scheduler;
    int current = -1;
    std::mt19937 random;
    void (*run)(void*) = nullptr;
    void* closure = nullptr;
};

inline Machine machine;

[[noreturn]] inline void fail(const char* what, const char* operation)
{
    std::fprintf(stderr, "simt: %s (%s), block %u, thread %d\n", what,
                 operation ? operation : "no operation", blockIdx.x, machine.current);
    std::fflush(stderr);
    std::abort();
}

inline Fiber& me() { return machine.fibers[machine.current]; }

inline void set_thread(int thread)
{
    machine.current = thread;
    threadIdx = {(unsigned)thread % blockDim.x, (unsigned)thread / blockDim.x % blockDim.y,
                 (unsigned)thread / (blockDim.x * blockDim.y)};
}

inline void yield_to_scheduler()
{
    const int thread = machine.current;
    swapcontext(&me().context, &machine.scheduler);
    set_thread(thread);
}

inline uint64_t rendezvous(const char* operation, unsigned mask, uint64_t value, int aux = 0)
{
    Fiber& fiber = me();
    if (!(mask >> (machine.current % 32) & 1)) fail("lane is not in its own mask", operation);
    fiber.wait = Wait::warp;
    fiber.operation = operation;
    fiber.mask = mask;
    fiber.given = value;
    fiber.aux = aux;
    yield_to_scheduler();
    return me().received;
}

inline uint64_t block_rendezvous(const char* operation, uint64_t value)
{
    Fiber& fiber = me();
    fiber.wait = Wait::block;
    fiber.operation = operation;
    fiber.given = value;
    yield_to_scheduler();
    return me().received;
}

inline float from_bf16(unsigned bits)
{
    const uint32_t wide = bits << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

// To nearest, ties to even.
inline unsigned round_to_bf16(float value)
{
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if (value != value) return bits >> 16 | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// A number of few bits: a sign, an exponent and `digits` binary digits behind the point, of which
// the least normal exponent is `least`. To nearest, ties to even; exponents have no upper end.
inline double round_to_digits(double value, int digits, int least)
{
    if (value == 0 || !std::isfinite(value)) return value;
    const int exponent = std::max(std::ilogb(value), least);
    return std::ldexp(std::nearbyint(std::ldexp(value, digits - exponent)), exponent - digits);
}

// The bits of a number that round_to_digits has left alone, without its sign.
inline unsigned bits_of_digits(double value, int digits, int least)
{
    if (value == 0) return 0;
    const int exponent = std::max(std::ilogb(value), least);
    const auto units = (unsigned)std::ldexp(value, digits - exponent);  // normal: 1.xyz
    return units + ((unsigned)(exponent - least) << digits);
}

// Both saturate.
inline unsigned round_to_half(float value)
{
    const unsigned sign = std::signbit(value) ? 0x8000 : 0;
    if (value != value) return 0x7fff;
    const double rounded = round_to_digits(std::min(std::fabs((double)value), 65504.0), 10, -14);
    return sign | bits_of_digits(rounded, 10, -14);
}

inline float from_half(unsigned bits)
{
    const int exponent = bits >> 10 & 31, digits = bits & 1023;
    float value = std::ldexp((float)(exponent ? digits + 1024 : digits), std::max(exponent, 1) - 25);
    if (exponent == 31) value = digits ? NAN : INFINITY;
    return bits >> 15 & 1 ? -value : value;
}

inline unsigned round_to_e4m3(float value)
{
    const unsigned sign = std::signbit(value) ? 0x80 : 0;
    if (value != value) return 0x7f;
    const double rounded = round_to_digits(std::min(std::fabs((double)value), 448.0), 3, -6);
    return sign | bits_of_digits(rounded, 3, -6);
}

inline float from_e4m3(unsigned bits)
{
    const int exponent = bits >> 3 & 15, digits = bits & 7;
    float value = std::ldexp((float)(exponent ? digits + 8 : digits), std::max(exponent, 1) - 10);
    if (exponent == 15 && digits == 7) value = NAN;
    return bits >> 7 & 1 ? -value : value;
}

// What a lane brings to a meeting over 8 x 8 matrices of 16-bit numbers, and takes away.
struct Matrices {
    unsigned char* row;  // of shared memory
    uint32_t* m;
};

struct Product {
    float (*number)(unsigned);  // of 16 bits
    float* c;
    uint32_t a[4];
    uint32_t b[2];
};

inline void load_lane(Fiber* lanes, int lane, bool transposed)
{
    uint32_t* const to = ((const Matrices*)lanes[lane].given)->m;
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
        uint16_t pair[2];
        for (int k = 0; k < 2; ++k) {
            const int row = transposed ? 2 * t + k : g, column = transposed ? g : 2 * t + k;
            const auto* from = ((const Matrices*)lanes[8 * i + row].given)->row;
            std::memcpy(&pair[k], from + 2 * column, 2);
        }
        std::memcpy(&to[i], pair, sizeof pair);
    }
}

inline void store_lane_transposed(Fiber* lanes, int lane)
{
    const uint32_t* const from = ((const Matrices*)lanes[lane].given)->m;
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 2; ++i)
        for (int k = 0; k < 2; ++k) {
            const auto number = (uint16_t)(from[i] >> 16 * k);
            std::memcpy(((const Matrices*)lanes[8 * i + 2 * t + k].given)->row + 2 * g, &number, 2);
        }
}

// c += a b of m16n8k16: products are exact, sums float32 in the order of k.
inline void multiply_lane(Fiber* lanes, int lane)
{
    const auto at = [&](int owner) { return (const Product*)lanes[owner].given; };
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
        const int row = g + i / 2 * 8, column = 2 * t + i % 2;
        float& sum = at(lane)->c[i];
        for (int k = 0; k < 16; ++k) {
            const uint32_t a = at(row % 8 * 4 + k % 8 / 2)->a[row / 8 + k / 8 * 2];
            const uint32_t b = at(column * 4 + k % 8 / 2)->b[k / 8];
            const auto number = at(lane)->number;
            sum += number(a >> k % 2 * 16 & 0xffff) * number(b >> k % 2 * 16 & 0xffff);
        }
    }
}

// True where the meeting was one over matrices; a lane's part of it is done.
inline bool serve_matrices(std::string_view op, Fiber* lanes, int count, int lane)
{
    const bool ours = op == "multiply" || op == "multiply_half" || op == "load" || op == "load_transposed" ||
                      op == "store_transposed";
    if (!ours) return false;
    if (count != 32) fail("a warp is not full", lanes[0].operation);
    if (op == "multiply" || op == "multiply_half")
        multiply_lane(lanes, lane);
    else if (op == "store_transposed")
        store_lane_transposed(lanes, lane);
    else
        load_lane(lanes, lane, op == "load_transposed");
    return true;
}

// What the lanes of a full meeting receive.
inline void serve_warp(Fiber* lanes, int count)
{
    const char* name = lanes[0].operation;
    const std::string_view op = name;
    uint64_t given[32] = {};
    for (int i = 0; i < count; ++i) given[i] = lanes[i].given;
    for (int i = 0; i < count; ++i) {
        Fiber& lane = lanes[i];
        if (op == "ballot") {
            uint64_t votes = 0;
            for (int k = 0; k < count; ++k) votes |= (uint64_t)(given[k] != 0) << k;
            lane.received = votes;
        } else if (op == "any" || op == "all") {
            int votes = 0;
            for (int k = 0; k < count; ++k) votes += given[k] != 0;
            lane.received = op == "any" ? votes > 0 : votes == count;
        } else if (op == "shfl") {
            const int from = lane.aux & 31;
            if (from >= count) fail("shuffle from a lane that is not there", name);
            lane.received = given[from];
        } else if (op == "shfl_up") {
            lane.received = given[i - lane.aux >= 0 ? i - lane.aux : i];
        } else if (op == "shfl_down") {
            lane.received = given[i + lane.aux < count ? i + lane.aux : i];
        } else if (op == "shfl_xor") {
            const int from = i ^ lane.aux;
            lane.received = given[from < count ? from : i];
        } else if (op == "match_any") {
            uint64_t same = 0;
            for (int k = 0; k < count; ++k) same |= (uint64_t)(given[k] == given[i]) << k;
            lane.received = same;
        } else if (op == "syncwarp" || serve_matrices(op, lanes, count, i)) {
            lane.received = 0;
        } else {
            const bool is_signed = op.front() == 's';
            uint64_t result = given[0];
            for (int k = 1; k < count; ++k) {
                if (op == "add") {
                    result = (uint32_t)(result + given[k]);
                } else if (op == "or") {
                    result |= given[k];
                } else if (op == "and") {
                    result &= given[k];
                } else if (is_signed) {
                    const int32_t a = (int32_t)result, b = (int32_t)given[k];
                    result = (uint32_t)(op == "smax" ? std::max(a, b) : std::min(a, b));
                } else {
                    result = op == "umax" ? std::max(result, given[k]) : std::min(result, given[k]);
                }
            }
            lane.received = result;
        }
    }
}

// Releases the warps whose lanes have all met; true where any was.
inline bool serve_warps()
{
    const int threads = (int)machine.fibers.size();
    bool any = false;
    for (int start = 0; start < threads; start += 32) {
        Fiber* lanes = &machine.fibers[start];
        const int count = std::min(32, threads - start);
        int waiting = 0;
        for (int i = 0; i < count; ++i) waiting += lanes[i].wait == Wait::warp;
        if (waiting != count) continue;
        const unsigned all = count == 32 ? 0xffffffffu : (1u << count) - 1;
        for (int i = 0; i < count; ++i) {
            if (std::strcmp(lanes[i].operation, lanes[0].operation) != 0)
                fail("lanes of a warp meet at different operations", lanes[i].operation);
            if ((lanes[i].mask & all) != all) fail("partial mask", lanes[i].operation);
        }
        serve_warp(lanes, count);
        for (int i = 0; i < count; ++i) lanes[i].wait = Wait::none;
        any = true;
    }
    return any;
}

inline bool serve_block()
{
    uint64_t any = 0, all = 1, count = 0;
    const char* operation = nullptr;
    for (Fiber& fiber : machine.fibers) {
        if (fiber.wait == Wait::done) continue;
        if (fiber.wait != Wait::block) return false;
        if (operation != nullptr && std::strcmp(operation, fiber.operation) != 0)
            fail("threads of a block meet at different barriers", fiber.operation);
        operation = fiber.operation;
        any |= fiber.given != 0;
        all &= fiber.given != 0;
        count += fiber.given != 0;
    }
    if (operation == nullptr) return false;
    const std::string_view op = operation;
    for (Fiber& fiber : machine.fibers) {
        if (fiber.wait == Wait::done) continue;
        fiber.received = op == "syncthreads_or" ? any : op == "syncthreads_and" ? all : count;
        fiber.wait = Wait::none;
    }
    return true;
}

inline void fiber_main()
{
    machine.run(machine.closure);
    me().wait = Wait::done;
    swapcontext(&me().context, &machine.scheduler);
}

inline void start_block(int threads)
{
    std::memset(dynamic_shared, 0xA5, sizeof dynamic_shared);
    if (__start_simt_shared != nullptr)
        std::memset(__start_simt_shared, 0xA5, __stop_simt_shared - __start_simt_shared);
    machine.fibers.resize(threads);
    machine.flights.clear();
    machine.idle_spins = 0;
    for (int t = 0; t < threads; ++t) {
        Fiber& fiber = machine.fibers[t];
        if (!fiber.stack) fiber.stack.reset(new unsigned char[STACK_BYTES]);
        fiber.wait = Wait::none;
        fiber.copies.clear();
        fiber.groups.clear();
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get();
        fiber.context.uc_stack.ss_size = STACK_BYTES;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, fiber_main, 0);
    }
}

// Lets the fibers that wait so look again; true where there are any.
inline bool wake(Wait kind)
{
    bool any = false;
    for (Fiber& fiber : machine.fibers) {
        if (fiber.wait != kind) continue;
        fiber.wait = Wait::none;
        any = true;
    }
    return any;
}

// True when the block has ended, false when it waits for other blocks.
inline bool run_block()
{
    std::vector<int> ready;
    for (;;) {
        ready.clear();
        bool alive = false;
        for (int t = 0; t < (int)machine.fibers.size(); ++t) {
            alive |= machine.fibers[t].wait != Wait::done;
            if (machine.fibers[t].wait == Wait::none) ready.push_back(t);
        }
        if (!alive) return true;
        if (ready.empty()) {
            if (serve_warps() || serve_block()) {
                machine.idle_spins = 0;
                continue;
            }
            if (++machine.idle_spins < 10000 && wake(Wait::barrier)) continue;
            for (const Fiber& fiber : machine.fibers)
                if (fiber.wait == Wait::others) return false;
            for (const Fiber& fiber : machine.fibers)
                if (fiber.wait != Wait::done) fail("not all threads arrive", fiber.operation);
        }
        std::shuffle(ready.begin(), ready.end(), machine.random);
        for (const int thread : ready) {
            set_thread(thread);
            swapcontext(&machine.scheduler, &machine.fibers[thread].context);
        }
    }
}

inline void set_aside(Block& block)
{
    block.index = blockIdx;
    block.fibers.swap(machine.fibers);
    block.flights.swap(machine.flights);
    const size_t fixed = __start_simt_shared == nullptr ? 0 : __stop_simt_shared - __start_simt_shared;
    block.memory.resize(sizeof dynamic_shared + fixed);
    std::memcpy(block.memory.data(), dynamic_shared, sizeof dynamic_shared);
    if (fixed) std::memcpy(&block.memory[sizeof dynamic_shared], __start_simt_shared, fixed);
}

inline void take_up(Block& block)
{
    blockIdx = block.index;
    block.fibers.swap(machine.fibers);
    block.flights.swap(machine.flights);
    const size_t fixed = block.memory.size() - sizeof dynamic_shared;
    std::memcpy(dynamic_shared, block.memory.data(), sizeof dynamic_shared);
    if (fixed) std::memcpy(__start_simt_shared, &block.memory[sizeof dynamic_shared], fixed);
    wake(Wait::others);
    machine.idle_spins = 0;
}

// Runs the blocks that wait for one another by turns, in any order.
inline void run_waiting(std::vector<Block>& waiting)
{
    for (int round = 0; !waiting.empty(); ++round) {
        if (round == PATIENCE) fail("blocks wait for one another", "wait_for_other_blocks");
        if (round > PATIENCE / 100) usleep(1000);  // for launches of other ranks
        std::shuffle(waiting.begin(), waiting.end(), machine.random);
        std::vector<Block> still;
        for (Block& block : waiting) {
            take_up(block);
            if (run_block()) continue;
            still.emplace_back();
            set_aside(still.back());
        }
        waiting.swap(still);
    }
}

inline void wait_for_other_blocks()
{
    me().wait = Wait::others;
    me().operation = "wait_for_other_blocks";
    yield_to_scheduler();
}

// Where a launch reads what those of other ranks may write, each in its own copy of the library and on
// its own thread: now and then long enough for them to get as far ahead as they can.
inline void linger()
{
    if (machine.random() % 128 == 0) usleep(50);
}

// Shared memory by address, bounds checked; a fiber may lose its turn here.
inline unsigned shared_address(const void* pointer)
{
    const auto at = (uintptr_t)pointer;
    const auto low = (uintptr_t)__start_simt_shared, high = (uintptr_t)__stop_simt_shared;
    if (at >= low && at < high) return (unsigned)(at - low);
    const auto dynamic = (uintptr_t)dynamic_shared;
    if (at >= dynamic && at < dynamic + SHARED_LIMIT) return (unsigned)(at - dynamic) + (1u << 30);
    fail("address is not in shared memory", "shared_address");
}

inline void* shared_pointer(unsigned address, size_t bytes)
{
    if (machine.random() % 16 == 0) yield_to_scheduler();
    const bool dynamic = address >= 1u << 30;
    const size_t offset = dynamic ? address - (1u << 30) : address;
    const size_t size =
        dynamic ? SHARED_LIMIT : (size_t)(__stop_simt_shared - __start_simt_shared);
    if (offset + bytes > size || offset % bytes != 0) fail("bad shared address", "shared_pointer");
    return (dynamic ? (char*)dynamic_shared : __start_simt_shared) + offset;
}

// Asynchronous copies happen at the wait, as late as they may.
inline void copy_later(void* to, const void* from, size_t bytes)
{
    if ((uintptr_t)to % bytes != 0 || (uintptr_t)from % bytes != 0)
        fail("unaligned copy", "copy_later");
    me().copies.push_back({to, from, bytes});
}

inline void copy_wait()
{
    for (const Copy& copy : me().copies) land(copy);
    me().copies.clear();
    me().groups.clear();
}

// What this thread has started since its last group becomes one; waits for all but its youngest.
inline void copy_commit()
{
    size_t grouped = 0;
    for (const size_t size : me().groups) grouped += size;
    me().groups.push_back(me().copies.size() - grouped);
}

inline void copy_wait_groups(size_t youngest)
{
    std::vector<Copy>& copies = me().copies;
    std::vector<size_t>& groups = me().groups;
    while (groups.size() > youngest) {
        for (size_t i = 0; i < groups.front(); ++i) land(copies[i]);
        copies.erase(copies.begin(), copies.begin() + groups.front());
        groups.erase(groups.begin());
    }
}

// A barrier in 8 bytes of shared memory. Copies may land before the phase expects their bytes.
struct Barrier {
    uint16_t expected;
    uint16_t missing;
    int16_t missing_chunks;  // of 16 bytes
    uint16_t phase;
};

inline Barrier& barrier_at(unsigned address) { return *(Barrier*)shared_pointer(address, 8); }

inline void barrier_init(unsigned address, int count)
{
    barrier_at(address) = {(uint16_t)count, (uint16_t)count, 0, 0};
}

inline void end_phase_if_complete(Barrier& barrier)
{
    if (barrier.missing != 0 || barrier.missing_chunks != 0) return;
    barrier.missing = barrier.expected;
    ++barrier.phase;
}

inline void barrier_arrive(unsigned address)
{
    Barrier& barrier = barrier_at(address);
    if (barrier.missing == 0) fail("too many arrive", "barrier_arrive");
    machine.idle_spins = 0;
    --barrier.missing;
    end_phase_if_complete(barrier);
}

inline void barrier_expect(unsigned address, size_t bytes)
{
    barrier_at(address).missing_chunks += (int16_t)(bytes / 16);
}

inline void barrier_arrive_after_copies(unsigned address)
{
    machine.flights.push_back({address, me().copies, false});
    if (me().groups.empty()) me().copies.clear();  // else the thread may wait for them as well
}

// One copy of many bytes, which the barrier counts; to addresses, as the copy engine takes them.
inline void copy_run(unsigned to, const void* from, size_t bytes, unsigned barrier)
{
    if (bytes % 16 != 0 || (uintptr_t)from % 16 != 0) fail("unaligned copy", "copy_run");
    unsigned char* const first = (unsigned char*)shared_pointer(to, 16);
    if (bytes > 16) shared_pointer(to + (unsigned)bytes - 16, 16);
    machine.flights.push_back({barrier, {{first, from, bytes}}, true});
}

// Copies land when somebody waits for them, as late as they may.
inline void land_flights(unsigned address)
{
    std::vector<Flight> others, landed;
    for (Flight& flight : machine.flights)
        (flight.barrier == address ? landed : others).push_back(std::move(flight));
    machine.flights.swap(others);
    for (const Flight& flight : landed) {
        for (const Copy& copy : flight.copies) land(copy);
        if (!flight.counts_bytes) {
            barrier_arrive(address);
            continue;
        }
        Barrier& barrier = barrier_at(address);
        for (const Copy& copy : flight.copies) barrier.missing_chunks -= (int16_t)(copy.bytes / 16);
        machine.idle_spins = 0;
        end_phase_if_complete(barrier);
    }
}

inline void barrier_wait(unsigned address, int parity)
{
    while ((barrier_at(address).phase & 1) == (unsigned)parity) {
        land_flights(address);
        if ((barrier_at(address).phase & 1) != (unsigned)parity) break;
        me().wait = Wait::barrier;
        me().operation = "barrier_wait";
        yield_to_scheduler();
    }
}

inline void load_matrices(uint32_t (&m)[4], unsigned row, bool transposed)
{
    Matrices mine = {(unsigned char*)shared_pointer(row, 16), m};
    rendezvous(transposed ? "load_transposed" : "load", 0xffffffffu, (uint64_t)&mine);
}

// Lanes 0 .. 15 give addresses; the others' are not looked at.
inline void store_matrices_transposed(unsigned row, uint32_t m0, uint32_t m1)
{
    uint32_t m[2] = {m0, m1};
    auto* const at = machine.current % 32 < 16 ? (unsigned char*)shared_pointer(row, 16) : nullptr;
    Matrices mine = {at, m};
    rendezvous("store_transposed", 0xffffffffu, (uint64_t)&mine);
}

struct PairA {
    uint32_t v[4];
};
struct PairB {
    uint32_t v[2];
};

inline void multiply_add_bf16(float (&c)[4], PairA a, PairB b)
{
    Product mine = {from_bf16, c, {a.v[0], a.v[1], a.v[2], a.v[3]}, {b.v[0], b.v[1]}};
    rendezvous("multiply", 0xffffffffu, (uint64_t)&mine);
}

inline void multiply_add_half(float (&c)[4], PairA a, PairB b)
{
    Product mine = {from_half, c, {a.v[0], a.v[1], a.v[2], a.v[3]}, {b.v[0], b.v[1]}};
    rendezvous("multiply_half", 0xffffffffu, (uint64_t)&mine);
}

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>)
{
    kernel(*(std::remove_cv_t<A>*)arguments[I]...);
}

template <class... A>
void launch(void (*kernel)(A...), void** arguments, const unsigned* grid, const unsigned* block,
            unsigned seed)
{
    struct Closure {
        void (*kernel)(A...);
        void** arguments;
    } closure{kernel, arguments};
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    machine.random.seed(seed);
    machine.closure = &closure;
    machine.run = [](void* c) {
        auto& own = *(Closure*)c;
        call(own.kernel, own.arguments, std::index_sequence_for<A...>{});
    };
    const unsigned blocks = grid[0] * grid[1] * grid[2];
    std::vector<Block> waiting;
    for (unsigned b = 0; b < blocks; ++b) {
        blockIdx = {b % grid[0], b / grid[0] % grid[1], b / (grid[0] * grid[1])};
        start_block((int)(block[0] * block[1] * block[2]));
        if (run_block()) continue;
        waiting.emplace_back();
        set_aside(waiting.back());
    }
    run_waiting(waiting);
}

template <class T>
uint64_t bits(T value)
{
    uint64_t raw = 0;
    std::memcpy(&raw, &value, sizeof value);
    return raw;
}

template <class T>
T value_of(uint64_t raw)
{
    T value;
    std::memcpy(&value, &raw, sizeof value);
    return value;
}

}  // namespace simt

using std::max;
using std::min;

inline void __syncwarp(unsigned mask = 0xffffffffu) { simt::rendezvous("syncwarp", mask, 0); }
inline void __syncthreads() { simt::block_rendezvous("syncthreads", 0); }
inline int __syncthreads_or(int p) { return (int)simt::block_rendezvous("syncthreads_or", p != 0); }
inline int __syncthreads_and(int p)
{
    return (int)simt::block_rendezvous("syncthreads_and", p != 0);
}
inline int __syncthreads_count(int p)
{
    return (int)simt::block_rendezvous("syncthreads_count", p != 0);
}
inline unsigned __ballot_sync(unsigned m, int p)
{
    return (unsigned)simt::rendezvous("ballot", m, p != 0);
}
inline int __any_sync(unsigned m, int p) { return (int)simt::rendezvous("any", m, p != 0); }
inline int __all_sync(unsigned m, int p) { return (int)simt::rendezvous("all", m, p != 0); }
template <class T>
T __shfl_sync(unsigned m, T v, int lane)
{
    return simt::value_of<T>(simt::rendezvous("shfl", m, simt::bits(v), lane));
}
template <class T>
T __shfl_up_sync(unsigned m, T v, int by)
{
    return simt::value_of<T>(simt::rendezvous("shfl_up", m, simt::bits(v), by));
}
template <class T>
T __shfl_down_sync(unsigned m, T v, int by)
{
    return simt::value_of<T>(simt::rendezvous("shfl_down", m, simt::bits(v), by));
}
template <class T>
T __shfl_xor_sync(unsigned m, T v, int by)
{
    return simt::value_of<T>(simt::rendezvous("shfl_xor", m, simt::bits(v), by));
}
template <class T>
unsigned __match_any_sync(unsigned m, T v)
{
    return (unsigned)simt::rendezvous("match_any", m, simt::bits(v));
}
inline int __reduce_max_sync(unsigned m, int v)
{
    return (int)simt::rendezvous("smax", m, (uint32_t)v);
}
inline int __reduce_min_sync(unsigned m, int v)
{
    return (int)simt::rendezvous("smin", m, (uint32_t)v);
}
inline unsigned __reduce_max_sync(unsigned m, unsigned v)
{
    return (unsigned)simt::rendezvous("umax", m, v);
}
inline unsigned __reduce_min_sync(unsigned m, unsigned v)
{
    return (unsigned)simt::rendezvous("umin", m, v);
}
template <class T>
T __reduce_add_sync(unsigned m, T v)
{
    return (T)simt::rendezvous("add", m, (uint32_t)v);
}
inline unsigned __reduce_or_sync(unsigned m, unsigned v)
{
    return (unsigned)simt::rendezvous("or", m, v);
}
inline unsigned __reduce_and_sync(unsigned m, unsigned v)
{
    return (unsigned)simt::rendezvous("and", m, v);
}

template <class T>
T atomicAdd(T* at, T v)
{
    const T old = *at;
    *at = old + v;
    return old;
}
template <class T>
T atomicMax(T* at, T v)
{
    const T old = *at;
    *at = std::max(old, v);
    return old;
}
template <class T>
T atomicMin(T* at, T v)
{
    const T old = *at;
    *at = std::min(old, v);
    return old;
}
template <class T>
T atomicOr(T* at, T v)
{
    const T old = *at;
    *at = old | v;
    return old;
}
template <class T>
T atomicExch(T* at, T v)
{
    const T old = *at;
    *at = v;
    return old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(unsigned v) { return __builtin_ffs((int)v); }
inline int __clz(unsigned v) { return v == 0 ? 32 : __builtin_clz(v); }
inline unsigned __brev(unsigned v)
{
    unsigned r = 0;
    for (int i = 0; i < 32; ++i) r |= (v >> i & 1) << (31 - i);
    return r;
}
inline int __float_as_int(float v) { return simt::value_of<int>(simt::bits(v)); }
inline float __int_as_float(int v) { return simt::value_of<float>(simt::bits(v)); }
inline int __float2int_rn(float v) { return (int)std::nearbyint(v); }
template <class T>
T __ldg(const T* at)
{
    return *at;
}
