// A kernel in which one thread of a CTA ends without the barrier that the others wait in: "before" they come, or
// "after".
#include <string>

#include "emulator.h"

int main(int, char** arguments) {
  const bool before = std::string(arguments[1]) == "before";
  emulated::launch({{1, 1, 1}, {64, 1, 1}, 0, true}, [&] {
    const bool ends = emulated::thread_index().x == 40;
    for (int i = 0; i < 20 && ends != before; ++i) emulated::yield();
    if (!ends) emulated::count_in_block(true);
  });
}
