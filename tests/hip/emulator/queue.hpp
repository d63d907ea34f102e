// Work that was submitted and has not run: streams, events, graphs, the order in which it all comes to run. See queue.cpp.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace emulator {

enum Error {
  SUCCESS = 0,
  INVALID_VALUE = 1,
  OUT_OF_MEMORY = 2,
  NO_DEVICE = 100,
  INVALID_DEVICE = 101,
  INVALID_IMAGE = 200,
  NO_BINARY_FOR_GPU = 209,
  INVALID_HANDLE = 400,
  ILLEGAL_STATE = 401,
  NOT_FOUND = 500,
  NOT_READY = 600,
  ILLEGAL_ADDRESS = 700,
  LAUNCH_FAILURE = 719,
  CAPTURE_UNSUPPORTED = 900,
  CAPTURE_INVALIDATED = 901,
  CAPTURED_EVENT = 907,
};

using Work = std::function<void()>;

struct Graph {
  std::vector<Work> nodes;
};
struct Stream {
  std::deque<Work> waiting;
  Graph* capturing = nullptr;
  int mode = 0;  // of the capture
  std::thread::id by;  // who began it
  bool invalidated = false;
};
// One recording of an event.
struct Mark {
  Stream* stream;
  bool captured, reached = false;
  double milliseconds = 0;
};
struct Event {
  std::shared_ptr<Mark> mark;  // of the last recording; none: what waits for it waits for nothing
};

// ---- what went wrong ---------------------------------------------------------------------------------------------
// hipError_t that every call gives from now on; SUCCESS where nothing has gone wrong.
int lost();
const std::string& last_failure();
// A fault of the card, found where the work runs. ROCm's runtime ends the process there, and so does this; where
// $WGRAD_EMULATED_FAULTS is "report", it stays as `lost()`, so that a test outlives the work that it is about.
void fault(const std::string& what, bool illegal);
// Forget it, and all work that waits.
void clear();

// ---- work --------------------------------------------------------------------------------------------------------
// Each gives a hipError_t.
int submit(Stream* stream, Work work);
// All that waits in one stream, or in all of them, runs now.
int finish(Stream* stream);
int finish_all();
// To be called first by every call that ROCm's runtime refuses while any stream captures in the global mode, or a stream
// of this thread in the thread-local one.
int unsafe();
int record(Event* event, Stream* stream);
int wait_for(const Event* event);
int query(const Event* event);
int query(Stream* stream);
int begin_capture(Stream* stream, int mode);
int end_capture(Stream* stream, Graph** graph);

Stream* create_stream();
void destroy_stream(Stream* stream);

}  // namespace emulator
