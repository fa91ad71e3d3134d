#include "shardcomm/layout.h"
