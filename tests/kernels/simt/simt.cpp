// The machine of simt.h: fibers, their meetings, shared memory and copies.
#include <setjmp.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string_view>
#include <vector>

#include "simt.h"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace simt {

constexpr size_t STACK_BYTES = 64 * 1024;
constexpr int PATIENCE = 20000;  // rounds of blocks that wait
alignas(128) unsigned char dynamic_shared[SHARED_LIMIT + 64];

enum class Wait { none, warp, block, barrier, others, done };

struct Copy {
    void* to;
    const void* from;  // null: zeros
    size_t bytes;
    std::shared_ptr<bool> landed = std::make_shared<bool>(false);  // whoever waits for it first
};

static void land(const Copy& copy)
{
    if (std::exchange(*copy.landed, true)) return;
    if (copy.from == nullptr)
        std::memset(copy.to, 0, copy.bytes);
    else
        std::memcpy(copy.to, copy.from, copy.bytes);
}

struct Fiber {
    jmp_buf context;  // where it goes on, unless it has not started
    bool is_new = true;
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
    jmp_buf scheduler;
    int current = -1;
    std::mt19937 random;
    void (*run)(void*) = nullptr;
    void* closure = nullptr;
};

static Machine machine;

[[noreturn]] static void fail(const char* what, const char* operation)
{
    std::fprintf(stderr, "simt: %s (%s), block %u, thread %d\n", what,
                 operation ? operation : "no operation", blockIdx.x, machine.current);
    std::fflush(stderr);
    std::abort();
}

static Fiber& me() { return machine.fibers[machine.current]; }

static void set_thread(int thread)
{
    machine.current = thread;
    threadIdx = {(unsigned)thread % blockDim.x, (unsigned)thread / blockDim.x % blockDim.y,
                 (unsigned)thread / (blockDim.x * blockDim.y)};
}

static void yield_to_scheduler()
{
    const int thread = machine.current;
    if (_setjmp(me().context) == 0) _longjmp(machine.scheduler, 1);
    set_thread(thread);
}

uint64_t rendezvous(const char* operation, unsigned mask, uint64_t value, int aux)
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

uint64_t block_rendezvous(const char* operation, uint64_t value)
{
    Fiber& fiber = me();
    fiber.wait = Wait::block;
    fiber.operation = operation;
    fiber.given = value;
    yield_to_scheduler();
    return me().received;
}

static float from_bf16(unsigned bits)
{
    const uint32_t wide = bits << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

// A number of few bits: a sign, an exponent and `digits` binary digits behind the point, of which
// the least normal exponent is `least`. To nearest, ties to even; exponents have no upper end.
static double round_to_digits(double value, int digits, int least)
{
    if (value == 0 || !std::isfinite(value)) return value;
    const int exponent = std::max(std::ilogb(value), least);
    return std::ldexp(std::nearbyint(std::ldexp(value, digits - exponent)), exponent - digits);
}

// The bits of a number that round_to_digits has left alone, without its sign.
static unsigned bits_of_digits(double value, int digits, int least)
{
    if (value == 0) return 0;
    const int exponent = std::max(std::ilogb(value), least);
    const auto units = (unsigned)std::ldexp(value, digits - exponent);  // normal: 1.xyz
    return units + ((unsigned)(exponent - least) << digits);
}

// Both saturate.
unsigned round_to_half(float value)
{
    const unsigned sign = std::signbit(value) ? 0x8000 : 0;
    if (value != value) return 0x7fff;
    const double rounded = round_to_digits(std::min(std::fabs((double)value), 65504.0), 10, -14);
    return sign | bits_of_digits(rounded, 10, -14);
}

static float from_half(unsigned bits)
{
    const int exponent = bits >> 10 & 31, digits = bits & 1023;
    float value = std::ldexp((float)(exponent ? digits + 1024 : digits), std::max(exponent, 1) - 25);
    if (exponent == 31) value = digits ? NAN : INFINITY;
    return bits >> 15 & 1 ? -value : value;
}

unsigned round_to_e4m3(float value)
{
    const unsigned sign = std::signbit(value) ? 0x80 : 0;
    if (value != value) return 0x7f;
    const double rounded = round_to_digits(std::min(std::fabs((double)value), 448.0), 3, -6);
    return sign | bits_of_digits(rounded, 3, -6);
}

float from_e4m3(unsigned bits)
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

static void load_lane(Fiber* lanes, int lane, bool transposed)
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

static void store_lane_transposed(Fiber* lanes, int lane)
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
static void multiply_lane(Fiber* lanes, int lane)
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
static bool serve_matrices(std::string_view op, Fiber* lanes, int count, int lane)
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
static void serve_warp(Fiber* lanes, int count)
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
static bool serve_warps()
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

static bool serve_block()
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

// A fiber serves one thread after another: of this block, of the next one, of the next launch.
static void fiber_main()
{
    for (;;) {
        machine.run(machine.closure);
        me().wait = Wait::done;
        yield_to_scheduler();
    }
}

// By setjmp, which leaves the signal mask alone: swapcontext asks the kernel for it every time.
static __attribute__((noinline)) void run_fiber(int thread)
{
    set_thread(thread);
    Fiber& fiber = me();
    if (_setjmp(machine.scheduler) != 0) return;
    if (!std::exchange(fiber.is_new, false)) _longjmp(fiber.context, 1);
    fiber.stack.reset(new unsigned char[STACK_BYTES]);
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = fiber.stack.get();
    start.uc_stack.ss_size = STACK_BYTES;
    start.uc_link = nullptr;
    makecontext(&start, fiber_main, 0);
    setcontext(&start);
}

static void start_block(int threads)
{
    std::memset(dynamic_shared, 0xA5, sizeof dynamic_shared);
    if (__start_simt_shared != nullptr)
        std::memset(__start_simt_shared, 0xA5, __stop_simt_shared - __start_simt_shared);
    machine.fibers.resize(threads);
    machine.flights.clear();
    machine.idle_spins = 0;
    for (int t = 0; t < threads; ++t) {
        Fiber& fiber = machine.fibers[t];
        fiber.wait = Wait::none;
        fiber.copies.clear();
        fiber.groups.clear();
    }
}

// Lets the fibers that wait so look again; true where there are any.
static bool wake(Wait kind)
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
static bool run_block()
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
        for (const int thread : ready) run_fiber(thread);
    }
}

static void set_aside(Block& block)
{
    block.index = blockIdx;
    block.fibers.swap(machine.fibers);
    block.flights.swap(machine.flights);
    const size_t fixed = __start_simt_shared == nullptr ? 0 : __stop_simt_shared - __start_simt_shared;
    block.memory.resize(sizeof dynamic_shared + fixed);
    std::memcpy(block.memory.data(), dynamic_shared, sizeof dynamic_shared);
    if (fixed) std::memcpy(&block.memory[sizeof dynamic_shared], __start_simt_shared, fixed);
}

static void take_up(Block& block)
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
static void run_waiting(std::vector<Block>& waiting)
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

void wait_for_other_blocks()
{
    me().wait = Wait::others;
    me().operation = "wait_for_other_blocks";
    yield_to_scheduler();
}

void linger()
{
    if (machine.random() % 128 == 0) usleep(50);
}

// Shared memory by address, bounds checked; a fiber may lose its turn here.
unsigned shared_address(const void* pointer)
{
    const auto at = (uintptr_t)pointer;
    const auto low = (uintptr_t)__start_simt_shared, high = (uintptr_t)__stop_simt_shared;
    if (at >= low && at < high) return (unsigned)(at - low);
    const auto dynamic = (uintptr_t)dynamic_shared;
    if (at >= dynamic && at < dynamic + SHARED_LIMIT) return (unsigned)(at - dynamic) + (1u << 30);
    fail("address is not in shared memory", "shared_address");
}

void* shared_pointer(unsigned address, size_t bytes)
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
void copy_later(void* to, const void* from, size_t bytes)
{
    if ((uintptr_t)to % bytes != 0 || (uintptr_t)from % bytes != 0)
        fail("unaligned copy", "copy_later");
    me().copies.push_back({to, from, bytes});
}

void copy_wait()
{
    for (const Copy& copy : me().copies) land(copy);
    me().copies.clear();
    me().groups.clear();
}

// What this thread has started since its last group becomes one; waits for all but its youngest.
void copy_commit()
{
    size_t grouped = 0;
    for (const size_t size : me().groups) grouped += size;
    me().groups.push_back(me().copies.size() - grouped);
}

void copy_wait_groups(size_t youngest)
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

static Barrier& barrier_at(unsigned address) { return *(Barrier*)shared_pointer(address, 8); }

void barrier_init(unsigned address, int count)
{
    barrier_at(address) = {(uint16_t)count, (uint16_t)count, 0, 0};
}

static void end_phase_if_complete(Barrier& barrier)
{
    if (barrier.missing != 0 || barrier.missing_chunks != 0) return;
    barrier.missing = barrier.expected;
    ++barrier.phase;
}

void barrier_arrive(unsigned address)
{
    Barrier& barrier = barrier_at(address);
    if (barrier.missing == 0) fail("too many arrive", "barrier_arrive");
    machine.idle_spins = 0;
    --barrier.missing;
    end_phase_if_complete(barrier);
}

void barrier_expect(unsigned address, size_t bytes)
{
    barrier_at(address).missing_chunks += (int16_t)(bytes / 16);
}

void barrier_arrive_after_copies(unsigned address)
{
    machine.flights.push_back({address, me().copies, false});
    if (me().groups.empty()) me().copies.clear();  // else the thread may wait for them as well
}

// One copy of many bytes, which the barrier counts; to addresses, as the copy engine takes them.
void copy_run(unsigned to, const void* from, size_t bytes, unsigned barrier)
{
    if (bytes % 16 != 0 || (uintptr_t)from % 16 != 0) fail("unaligned copy", "copy_run");
    unsigned char* const first = (unsigned char*)shared_pointer(to, 16);
    if (bytes > 16) shared_pointer(to + (unsigned)bytes - 16, 16);
    machine.flights.push_back({barrier, {{first, from, bytes}}, true});
}

// Copies land when somebody waits for them, as late as they may.
static void land_flights(unsigned address)
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

void barrier_wait(unsigned address, int parity)
{
    while ((barrier_at(address).phase & 1) == (unsigned)parity) {
        land_flights(address);
        if ((barrier_at(address).phase & 1) != (unsigned)parity) break;
        me().wait = Wait::barrier;
        me().operation = "barrier_wait";
        yield_to_scheduler();
    }
}

void load_matrices(uint32_t (&m)[4], unsigned row, bool transposed)
{
    Matrices mine = {(unsigned char*)shared_pointer(row, 16), m};
    rendezvous(transposed ? "load_transposed" : "load", 0xffffffffu, (uint64_t)&mine);
}

// Lanes 0 .. 15 give addresses; the others' are not looked at.
void store_matrices_transposed(unsigned row, uint32_t m0, uint32_t m1)
{
    uint32_t m[2] = {m0, m1};
    auto* const at = machine.current % 32 < 16 ? (unsigned char*)shared_pointer(row, 16) : nullptr;
    Matrices mine = {at, m};
    rendezvous("store_transposed", 0xffffffffu, (uint64_t)&mine);
}

void multiply_add_bf16(float (&c)[4], PairA a, PairB b)
{
    Product mine = {from_bf16, c, {a.v[0], a.v[1], a.v[2], a.v[3]}, {b.v[0], b.v[1]}};
    rendezvous("multiply", 0xffffffffu, (uint64_t)&mine);
}

void multiply_add_half(float (&c)[4], PairA a, PairB b)
{
    Product mine = {from_half, c, {a.v[0], a.v[1], a.v[2], a.v[3]}, {b.v[0], b.v[1]}};
    rendezvous("multiply_half", 0xffffffffu, (uint64_t)&mine);
}

void launch(void (*run)(void*), void* closure, const unsigned* grid, const unsigned* block,
            unsigned seed)
{
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    machine.random.seed(seed);
    machine.closure = closure;
    machine.run = run;
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

}  // namespace simt
