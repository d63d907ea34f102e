// The entry points of libhiprtc.so that wgrad uses. What a program is given is written to a folder of its own under
// $WGRAD_EMULATED_HIPRTC (program N in folder N: its files, and `options`, one a line); compiling it runs compile.py,
// which leaves `image` or `log` there.
#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#define API extern "C" __attribute__((visibility("default")))

namespace {

enum Result { SUCCESS = 0, PROGRAM_CREATION_FAILURE = 2, INVALID_INPUT = 3, COMPILATION = 6 };

struct Program {
  std::string folder, name, image, log;
};

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

bool write(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  return bool(file << text);
}

}  // namespace

API const char* hiprtcGetErrorString(int) { return "emulated hiprtc"; }
API int hiprtcVersion(int* major, int* minor) { return *major = 9, *minor = 0, SUCCESS; }
API int hiprtcCreateProgram(Program** program, const char* source, const char* name, int count, const char** headers,
                            const char** names) {
  const char* root = getenv("WGRAD_EMULATED_HIPRTC");
  if (!root || !source || !name) return INVALID_INPUT;
  std::string folder;
  for (int n = 0;; n++) {
    folder = std::string(root) + "/" + std::to_string(n);
    if (!mkdir(folder.c_str(), 0777)) break;
    if (errno != EEXIST) return PROGRAM_CREATION_FAILURE;
  }
  bool written = write(folder + "/" + name, source);
  for (int i = 0; i < count; i++) written = written && write(folder + "/" + names[i], headers[i]);
  *program = new Program{folder, name, {}, {}};
  return written ? SUCCESS : PROGRAM_CREATION_FAILURE;
}
API int hiprtcCompileProgram(Program* program, int count, const char** options) {
  std::string lines;
  for (int i = 0; i < count; i++) lines += std::string(options[i]) + "\n";
  write(program->folder + "/options", lines);
  const char* compiler = getenv("WGRAD_EMULATED_HIPRTC_COMPILER");
  if (!compiler) return INVALID_INPUT;
  // The emulated card's library must not reach the compiler.
  std::string command = "env -u LD_LIBRARY_PATH " + std::string(compiler) + " " + program->folder + " " + program->name;
  int status = system(command.c_str());
  program->log = read(program->folder + "/log");
  program->image = read(program->folder + "/image");
  return status || program->image.empty() ? COMPILATION : SUCCESS;
}
API int hiprtcGetProgramLogSize(Program* program, size_t* size) { return *size = program->log.size() + 1, SUCCESS; }
API int hiprtcGetProgramLog(Program* program, char* log) {
  return memcpy(log, program->log.c_str(), program->log.size() + 1), SUCCESS;
}
API int hiprtcGetCodeSize(Program* program, size_t* size) { return *size = program->image.size(), SUCCESS; }
API int hiprtcGetCode(Program* program, char* code) {
  return memcpy(code, program->image.data(), program->image.size()), SUCCESS;
}
API int hiprtcDestroyProgram(Program** program) {
  delete *program;
  return *program = nullptr, SUCCESS;
}
