{{/* How processes are reached, and by which devices they reach each other. */}}

{{/* Host that processes listen on. */}}
{{- define "epserve.listen" -}}
{{- with .Values.network -}}
{{ ternary "[::]" "0.0.0.0" (or (has "IPv6" .ipFamilies) (eq .ipFamilyPolicy "RequireDualStack")) }}
{{- end -}}
{{- end -}}

{{- define "epserve.serviceFamilies" -}}
{{- with .Values.network.ipFamilyPolicy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .Values.network.ipFamilies }}
ipFamilies: {{ toJson . }}
{{- end }}
{{- end -}}

{{/* Environment, by name, as JSON: what NCCL, gloo, NVSHMEM and UCX are told of a worker's network.
     docs/network.md says what each does. Takes root and worker. */}}
{{- define "epserve.networkEnv" -}}
{{- $rdma := .worker.rdma }}
{{- $env := dict }}
{{- with $rdma.socketInterface }}
{{- $env = dict "NCCL_SOCKET_IFNAME" . "GLOO_SOCKET_IFNAME" . "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME" . }}
{{- end }}
{{- with $rdma.devices }}
{{- $_ := set $env "NCCL_IB_HCA" (printf "=%s" (join "," .)) }}
{{- /* NVSHMEM looks at its list only with the mapping on. */}}
{{- $_ := set $env "NVSHMEM_HCA_LIST" (join "," .) }}
{{- $_ := set $env "NVSHMEM_ENABLE_NIC_PE_MAPPING" "1" }}
{{- $_ := set $env "UCX_NET_DEVICES" (append . $rdma.socketInterface | compact | join ",") }}
{{- end }}
{{- if ge (int $rdma.gidIndex) 0 }}
{{- range list "NCCL" "NVSHMEM" "UCX" }}
{{- $_ := set $env (printf "%s_IB_GID_INDEX" .) (toString $rdma.gidIndex) }}
{{- end }}
{{- end }}
{{- /* Inside a node NVSHMEM sends by NVLink, and must not fail for what adapters lack. */}}
{{- if and $rdma.resource (gt (int .worker.nodes) 1) (ne $rdma.nicHandler "auto") }}
{{- $_ := set $env "NVSHMEM_IBGDA_NIC_HANDLER" $rdma.nicHandler }}
{{- end }}
{{- if $rdma.gdrcopy }}
{{- $_ := set $env "NVIDIA_GDRCOPY" "enabled" }}
{{- end }}
{{- if eq "IPv6" (first .root.Values.network.ipFamilies | default "") }}
{{- range list "NCCL_SOCKET_FAMILY" "NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY" }}
{{- $_ := set $env . "AF_INET6" }}
{{- end }}
{{- end }}
{{- toJson $env }}
{{- end -}}
