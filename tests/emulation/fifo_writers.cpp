// Many threads of a grid write commands into FIFOs, and a thread of the host takes them: each once, each writer's in
// order, all fields as they were. A FIFO that is full of them still takes ends of calls. Prints "right", or what was
// not.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <thread>
#include <vector>

#include "transport/fifo.cuh"

using namespace hybrid_ep;

namespace {

constexpr int kCtas = 4, kThreads = 32, kFifos = 2, kTakenBetweenPauses = 16000;

struct Params {
  FifoView fifos;
  int num_commands;  // of each writer
};

// A command that says who wrote it and as which of its own.
Command command_of(int writer, int i) {
  Command command{};
  command.kind = i % 2 == 0 ? CommandKind::kPut : CommandKind::kCredit;
  command.ring = writer % kMaxRings;
  command.peer = writer % kMaxDomains;
  command.slot = i % kMaxSlots;
  command.num_bytes = static_cast<uint32_t>(i) * 16;
  command.word = static_cast<uint64_t>(writer) << 40 | static_cast<uint64_t>(i);
  return command;
}

void write_commands(const Params params) {
  const int writer = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  for (int i = 0; i < params.num_commands; ++i) {
    push_command(params.fifos, static_cast<int>(blockIdx.x) % kFifos, command_of(writer, i), [] { return false; });
  }
}

// Fills a FIFO that nobody reads, then ends calls. Returns how many commands, and ends, it took.
struct Taken {
  int commands, ends;
};
Taken fill(const FifoView& fifos) {
  Taken taken{};
  emulated::launch({{1, 1, 1}, {kThreads, 1, 1}, 0, true}, [&] {
    if (threadIdx.x > 0) return;
    const auto give_up = [] { return true; };
    while (push_command(fifos, 0, command_of(0, 0), give_up)) ++taken.commands;
    while (push_command(fifos, 0, {CommandKind::kEnd, 0, 0, 0, 0, 1}, give_up)) ++taken.ends;
  });
  return taken;
}

bool is_equal(const Command& a, const Command& b) {
  return a.kind == b.kind && a.ring == b.ring && a.peer == b.peer && a.slot == b.slot && a.num_bytes == b.num_bytes &&
         a.word == b.word;
}

}  // namespace

int main(int, char** arguments) {
  const int num_commands = std::atoi(arguments[1]);
  std::vector<PackedCommand> commands(kFifos * kFifoSlots);
  std::vector<FifoCursor> done(kFifos), heads(kFifos), known(kFifos);
  const FifoView view{commands.data(), done.data(), heads.data(), known.data(), kFifos};
  {
    std::vector<PackedCommand> unread(kFifoSlots);
    std::vector<FifoCursor> cursors(3);
    const Taken taken = fill({unread.data(), &cursors[0], &cursors[1], &cursors[2], 1});
    if (taken.commands + taken.ends != kFifoSlots || taken.ends != kEndSlots) {
      std::printf("a full FIFO took %d commands and %d ends of calls\n", taken.commands, taken.ends);
      return 1;
    }
  }
  std::map<int, int> next;  // of each writer
  int num_taken = 0, num_pauses = 0;
  std::thread reader([&] {
    std::vector<FifoReader> readers;
    for (int fifo = 0; fifo < kFifos; ++fifo) readers.emplace_back(view, fifo);
    while (num_taken < kCtas * kThreads * num_commands) {
      for (FifoReader& fifo : readers) {
        Command command;
        for (int i = 0; i < 32 && fifo.peek(&command); ++i) {
          const int writer = static_cast<int>(command.word >> 40);
          if (!is_equal(command, command_of(writer, next[writer]++))) {
            std::printf("command %d of writer %d is not what was written\n", next[writer] - 1, writer);
            std::exit(1);
          }
          fifo.take();
          ++num_taken;
        }
        fifo.publish();
      }
      // Now and then the reader stops for so long that the writers must wait for free slots.
      const bool is_late = num_taken / kTakenBetweenPauses > num_pauses;
      num_pauses += is_late;
      std::this_thread::sleep_for(std::chrono::milliseconds(is_late ? 300 : 0));
    }
  });
  const Params params{view, num_commands};
  emulated::launch({{kCtas, 1, 1}, {kThreads, 1, 1}, 0, true}, [&] { write_commands(params); });
  reader.join();
  std::puts("right");
}
