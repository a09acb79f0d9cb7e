// Runs every test that was linked in, or those whose name contains the argument.
//   Exit status 77, which CTest counts as skipped: this machine has not the level that FEDCORE_ISA asks for.
#include <cstring>
#include <stdexcept>

#include "base/isa.h"
#include "check.h"

int main(int count, char** arguments) {
    try {
        std::printf("level %s\n", fedcore::name(fedcore::active_isa()));
    } catch (const std::runtime_error& error) {
        std::printf("%s\n", error.what());
        return 77;
    }
    int ran = 0;
    for (const fedcore::test::Test& test : fedcore::test::tests()) {
        if (count > 1 && std::strstr(test.name, arguments[1]) == nullptr) continue;
        std::printf("%s\n", test.name);
        std::fflush(stdout);  // or a child of fork would print it too
        test.run();
        ++ran;
    }
    return ran != 0 ? 0 : 1;
}
