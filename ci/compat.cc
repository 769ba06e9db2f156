// Definitions that a library compiled with GCC 11 or newer would otherwise take from a libstdc++ or libc newer
// than manylinux_2_28 promises.  Linked into the extension; nothing here is exported.
#include <sstream>

// std::shared_ptr reads this flag (GLIBC_2.32).  Zero means "threads may run", which is always safe.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded;
}

// C++20 str() overloads are GLIBCXX_3.4.29, the default constructors of the streams GLIBCXX_3.4.26.
template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;
template class std::basic_istringstream<char>;
template class std::basic_stringstream<char>;
