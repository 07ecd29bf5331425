// Where bytes really are. For memory.c and streams.c.
#pragma once

void *bytes_of(const void *address);  // the shadow of a device address; other addresses as they are
