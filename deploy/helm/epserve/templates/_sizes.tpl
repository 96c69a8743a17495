{{/* How much of a node a worker's pod needs. The context of each is a dict: root, worker. */}}

{{/* As JSON: cpu, memory, limit, shm (GiB) and startSeconds, from the model's size, ranks, nodes and
     device. README.md says why so much. */}}
{{- define "epserve.sizes" -}}
{{- $ranks := int64 .worker.ranks }}
{{- $size := ceil .root.Values.model.sizeGiB | int64 }}
{{- $share := divf .root.Values.model.sizeGiB .worker.nodes | ceil | int64 }}
{{- $sizes := dict "cpu" (add 1 $ranks) "shm" 1 "memory" (add 2 (mul 2 $ranks) (mul 2 $share)) }}
{{- $_ := set $sizes "limit" (mul 2 $sizes.memory) }}
{{- if eq .worker.device "cuda" }}
{{- $sizes = dict "cpu" (add 4 (mul 4 $ranks)) "shm" (mul 2 $ranks) "memory" (add 8 (mul 14 $ranks)) }}
{{- $_ := set $sizes "limit" (add $sizes.memory $share) }}
{{- end }}
{{- set $sizes "startSeconds" (add 600 (mulf 4.3 $size | ceil)) | toJson }}
{{- end -}}

{{- define "epserve.startSeconds" -}}
{{- .worker.startSeconds | default (include "epserve.sizes" . | fromJson).startSeconds }}
{{- end -}}

{{- define "epserve.shmSize" -}}
{{- .worker.shmSize | default (printf "%dGi" (include "epserve.sizes" . | fromJson | dig "shm" 0 | int64)) }}
{{- end -}}

{{/* Requests and limits, with a GPU for each rank and the RDMA devices of the pod, as JSON. */}}
{{- define "epserve.workerResources" -}}
{{- $sizes := include "epserve.sizes" . | fromJson }}
{{- $devices := dict }}
{{- if eq .worker.device "cuda" }}
{{- $_ := set $devices .worker.gpuResource (toString .worker.ranks) }}
{{- end }}
{{- if .worker.rdma.resource }}
{{- $_ := set $devices .worker.rdma.resource (toString .worker.rdma.count) }}
{{- end }}
{{- $requests := dict "cpu" (toString $sizes.cpu) "memory" (printf "%dGi" (int64 $sizes.memory)) }}
{{- $limits := dict "memory" (printf "%dGi" (int64 $sizes.limit)) }}
{{- dict
  "requests" (merge (dict) .worker.resources.requests $devices $requests)
  "limits" (merge (dict) .worker.resources.limits $devices $limits) | toJson }}
{{- end -}}

{{/* A quantity of memory or of devices as a number. */}}
{{- define "epserve.number" -}}
{{- $factors := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 }}
{{- $text := toString . }}
{{- mulf (regexFind "^[0-9.]+" $text | float64) (index $factors (regexFind "[A-Za-z]*$" $text)) }}
{{- end -}}
