// libnvrtc of the null GPU: it compiles nothing, and says so.
enum { NVRTC_SUCCESS, NVRTC_ERROR_COMPILATION = 6 };

int nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 0;
    return NVRTC_SUCCESS;
}
const char *nvrtcGetErrorString(int error) { return "the null GPU has no nvrtc"; }
int nvrtcCompileProgram(void *program, int count, const char *const *options) { return NVRTC_ERROR_COMPILATION; }
